"""Import of other trainers' caches: one module per tool reads, `writer` writes."""

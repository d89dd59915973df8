"""Files of other trainers, read and written: one module per tool, `convert` for both directions."""

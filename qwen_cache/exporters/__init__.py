"""Export for other trainers: one module per tool writes what its published code reads, `writer` plans and runs."""

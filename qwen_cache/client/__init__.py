"""A client of `qwen-cache serve`: plans here, encodes there. Imports no torch."""

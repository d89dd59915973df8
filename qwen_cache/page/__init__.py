"""What `qwen-cache inspect` can say beyond counts: a page, flags, one sample whole. Importing it imports no torch."""

"""What `qwen-cache inspect` reports: counts, flags, duplicates, doubtful masks, a page. No torch at import."""

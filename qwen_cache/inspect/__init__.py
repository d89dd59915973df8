"""The report of `qwen-cache inspect`: counts, flags, duplicates, doubtful masks, a page. No torch at import."""

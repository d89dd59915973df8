"""From caches to batches."""

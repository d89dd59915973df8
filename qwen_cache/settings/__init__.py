"""qwen.yaml: one file for both programs."""

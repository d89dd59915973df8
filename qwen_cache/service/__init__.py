"""Encoders that stay loaded, for many clients: `qwen-cache serve` and its client."""

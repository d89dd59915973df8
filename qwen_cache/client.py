"""The client of `qwen-cache serve`, by its public name."""

from qwen_cache.service.client import Client

__all__ = ["Client"]

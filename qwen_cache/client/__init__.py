"""A client of `qwen-cache serve`: plans here, encodes there. Imports no torch."""

from qwen_cache.client.client import Client

__all__ = ["Client"]

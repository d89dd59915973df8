"""The command line of `qwen-cache`: `app` declares the options, one module for each command does the work."""

from qwen_cache.cli.app import main

__all__ = ["main"]

"""The command line of `qwen-cache`: `app` declares the options, and each command has a module that does its work."""

from qwen_cache.cli.app import main

__all__ = ["main"]

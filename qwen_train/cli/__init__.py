"""The command line of `qwen-train`: `app` declares the options, one module for each command does the work."""

from qwen_train.cli.app import main

__all__ = ["main"]

"""The version of both packages: its only place."""

__version__ = "0.1.0"

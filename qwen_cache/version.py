"""The version of both packages, defined only here."""

__version__ = "0.1.0"

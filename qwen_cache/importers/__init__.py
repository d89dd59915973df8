"""Caches that other trainers made, as datasets of this format: one module per tool, and one that writes."""

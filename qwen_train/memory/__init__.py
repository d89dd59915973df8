"""The memory of a run, predicted by part before it begins."""

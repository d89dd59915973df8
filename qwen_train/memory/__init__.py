"""How much memory a run takes, by part, before it begins."""

"""Model folders on disk or on the hub, and what each model family needs."""

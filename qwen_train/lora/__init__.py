"""LoRA adapters: added to the transformer, saved, exported."""

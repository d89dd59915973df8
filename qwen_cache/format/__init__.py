"""The dataset format: everything that reads it, and what it takes to write it. No torch, no diffusers at import."""

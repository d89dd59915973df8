"""The dataset format: reading, checking and writing it. Imports neither torch nor diffusers."""

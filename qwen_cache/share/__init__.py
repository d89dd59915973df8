"""A cache as a dataset repository on the hub."""

"""The Train page: a run's command line, its curves and images as they come, and runs side by side."""

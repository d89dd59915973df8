"""One module for each kind of source, and what they share."""

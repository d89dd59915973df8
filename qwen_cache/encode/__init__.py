"""The encoders: from rows of a source to the samples of a cache."""

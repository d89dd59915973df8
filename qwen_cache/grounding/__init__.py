"""The place of an edit: from attention, or from the difference of images."""

"""Where an edit is: from attention, or from the difference of images."""

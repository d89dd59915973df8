"""Never run on the real encoder: the place of an edit, from attention, from differences, from a trained head."""

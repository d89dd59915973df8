"""Sources of samples: one module for each kind, images, and the sizes they get. Importing this imports no torch."""

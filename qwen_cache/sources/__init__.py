"""Sources of samples: one module per kind, image decoding, and image sizes. Imports no torch."""

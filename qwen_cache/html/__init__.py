"""HTML pages: templates, style, scripts and charts, independent of caches and runs."""

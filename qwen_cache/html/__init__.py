"""How HTML pages are written: templates, style, scripts and charts. Nothing here knows a cache or a run."""

"""Files: written atomically, locked, local or remote. Independent of the format."""

"""Files: written whole or not at all, locked, local or remote. Knows nothing of the format."""

"""The Data page: the rows of a source, their problems, and edits that go into the source's own files."""

"""From a source to a verified build."""

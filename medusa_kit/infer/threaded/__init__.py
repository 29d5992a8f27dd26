"""A batch that has a thread of its own, and takes rows from any other."""

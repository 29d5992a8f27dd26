"""A scheduler that has a thread of its own, and takes requests from any other."""

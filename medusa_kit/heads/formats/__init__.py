"""Medusa checkpoints of other engines: recognised by their tensors, read, and written."""

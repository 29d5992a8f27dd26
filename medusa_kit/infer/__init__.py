"""Decoding: propose a tree, verify it in one forward, accept a path, commit it (see batch.py)."""

"""Requests in batches: draft, verify in one forward, accept a path, commit it (see batch.py)."""

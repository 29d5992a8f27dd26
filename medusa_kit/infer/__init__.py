"""Decoding. Here: what forwards and batches share. ARCHITECTURE.md has the order of the folders."""

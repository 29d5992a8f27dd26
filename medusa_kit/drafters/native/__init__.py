"""Drafts that a base brings along: layers of its own checkpoint, trained to draft for it."""

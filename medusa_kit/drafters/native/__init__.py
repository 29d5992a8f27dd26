"""Drafts that a base brings along: layers of its own checkpoint that were trained to draft for it."""

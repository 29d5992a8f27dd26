"""Checkpoints that bring drafts along."""

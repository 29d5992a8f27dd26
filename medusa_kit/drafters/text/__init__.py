"""Drafters that copy from text and tables."""

"""Drafters that use heads."""

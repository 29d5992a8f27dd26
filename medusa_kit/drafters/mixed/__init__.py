"""Drafters that combine several others."""

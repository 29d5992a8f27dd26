"""Drafters that ask the heads."""

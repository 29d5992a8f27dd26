"""Drafters that ask a smaller model."""

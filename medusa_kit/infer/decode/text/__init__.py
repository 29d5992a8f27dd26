"""Tokens as bytes, and looking for bytes among them."""

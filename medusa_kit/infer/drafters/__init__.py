"""Drafters: every way of guessing ahead, one file each, behind one interface (base.py)."""

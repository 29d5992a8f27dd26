"""Faults of a machine and its files that several parts have to tell: damaged numbers, full memory."""

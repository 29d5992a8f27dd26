"""Faults that several parts have to tell: damaged numbers, full memory."""

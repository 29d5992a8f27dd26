"""Decoding steps in C++ for CPUs: linear layers for a few rows, and whole steps."""

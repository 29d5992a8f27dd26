"""Triton kernels of the fused forward. They are imported where it first runs."""

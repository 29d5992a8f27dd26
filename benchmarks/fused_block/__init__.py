"""Measures the fused forward on a GPU: are bits equal, how fast are steps, what do answers gain."""

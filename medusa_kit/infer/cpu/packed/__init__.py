"""Weights as the C++ kernels read them, and a base model that is made of them alone."""

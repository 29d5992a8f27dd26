"""The C++ kernels as a library: compiled, opened, and what its functions take."""

"""Checks of the GPU path that need no GPU: `make gpu-check`."""

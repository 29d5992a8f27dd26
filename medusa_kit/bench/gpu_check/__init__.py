"""What can be checked of the GPU path without a GPU: `make gpu-check`."""

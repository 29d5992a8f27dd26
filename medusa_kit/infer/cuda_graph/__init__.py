"""Steps of fixed shapes: a whole step on the device, in one CUDA graph where there is CUDA."""

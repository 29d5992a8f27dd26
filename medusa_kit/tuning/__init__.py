"""What suits this model and this machine: calibration, step times, the tree."""

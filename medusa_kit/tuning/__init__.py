"""Tuning for a model and a machine: calibration, step times, the tree."""

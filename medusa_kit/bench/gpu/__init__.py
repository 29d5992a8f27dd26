"""`medusa-kit doctor --gpu`: whether the GPU path works on this machine, and how long steps take.

Weights are random in the shape of a real model, so nothing is downloaded.
"""

"""`medusa-kit doctor --gpu`: measures the GPU path on this machine in one run.

`measure.py` lists the parts in order of importance; `runner.py` runs each, catches its errors and
saves the report after it. Weights are random in the shapes of real models, so nothing is
downloaded.
"""

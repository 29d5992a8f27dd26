"""`medusa-kit doctor --gpu`: what the kit's GPU path does on this machine, measured in one run.

`measure.py` lists the parts in order of importance, `runner.py` runs each under a guard and saves
the report behind it. Weights are random in the shapes of real models, so nothing is downloaded.
"""

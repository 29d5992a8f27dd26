"""The first 45 minutes on a real GPU: five commands that save what they find as they go.

`commands.py` lists each command's parts in order of importance; `runner.py` runs them, catches
their errors and saves the report after each. Weights are random in the shapes of real models.
"""

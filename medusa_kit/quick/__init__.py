"""`medusa-kit train --quick`: heads for a model in a given time, from prompts to a bench.

The page to read first is run.py; plan.py divides the time, settings.py has what is trained.
"""

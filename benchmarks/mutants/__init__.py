"""Faults put into the code one at a time, to see whether the tests notice: a fixed list of them.

`mutants.json` is the list, drawn once by a seed. A mutant is a line of a function and what it is
changed to, so that it can be found again in code that has moved. `results.json` says of each
whether its tests failed (killed), passed (survived), or the line is gone (not found).

    python -m benchmarks.mutants draw [--tree FOLDER]
    python -m benchmarks.mutants run [--tree FOLDER] [--only 1-20,35] [--output FILE]
"""

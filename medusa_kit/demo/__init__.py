"""`make demo`: what the kit gains on this machine, and a small training run.

__main__    the program: folder, order of the parts, errors
work        how much is done, by when
threads     all, or one where that is faster
messages    what is printed
comparison  methods side by side on the fixed prompts, with intervals
own_heads   answers, training and tree
curve       acceptance length against updates
"""

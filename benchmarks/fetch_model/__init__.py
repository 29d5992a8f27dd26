"""`make model`: a real model's file, brought into the kit's cache folder under a name of its own.

`fetching.py` tries the sources of `sources.py` in turn, and `mirror.py` is the last of them. What
the names stand for is in medusa_kit/base/own_models.py. No test and no other target needs the file.
"""

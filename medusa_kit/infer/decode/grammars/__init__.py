"""Grammars before there is a model: what is wrong with one, what of a schema can be followed."""

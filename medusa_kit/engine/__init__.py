"""The engine: a base model, heads and a tree, loaded and ready to answer."""

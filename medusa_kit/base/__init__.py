"""The base model: where its files are, how it is loaded, what tells it from another."""

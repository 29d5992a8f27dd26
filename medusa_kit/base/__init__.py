"""The base model: where its files are, how it is loaded, how it is identified."""

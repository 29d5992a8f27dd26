"""Tools, schemas and thoughts: what the model is shown of them, what it may write, what is read."""

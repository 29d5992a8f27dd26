"""Training heads: data, features, loss, engine and the training loop."""

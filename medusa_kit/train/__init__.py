"""Training heads: data, features, loss, engine, and the loop that ties them together."""

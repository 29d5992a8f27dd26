"""The frozen base's hidden states, in memory or on disk."""

"""GGUF files of tiny models, written for tests."""

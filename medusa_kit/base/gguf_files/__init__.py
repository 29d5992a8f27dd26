"""GGUF files as they lie on the disk: checked, found in parts, read tensor by tensor."""

"""How text and conversations become a base model's tokens."""

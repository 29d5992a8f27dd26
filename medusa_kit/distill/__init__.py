"""The base model's own answers, as text to train heads on."""

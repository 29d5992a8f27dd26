"""A smaller model as drafter."""

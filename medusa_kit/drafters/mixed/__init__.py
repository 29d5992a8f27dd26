"""Several drafters at once."""

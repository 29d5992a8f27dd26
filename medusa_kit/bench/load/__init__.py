"""A running server under load: how fast, how soon, and whether answers stay exact."""

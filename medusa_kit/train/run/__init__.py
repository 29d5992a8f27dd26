"""A training run: its folder, its schedule, its result."""

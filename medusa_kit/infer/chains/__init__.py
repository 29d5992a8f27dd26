"""Chains of draft tokens, verified on models whose layers carry a state from token to token."""

"""Acceptance: its rules, the choice of a token, and the logits from which it is chosen."""

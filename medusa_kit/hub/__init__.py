"""Heads on the Hugging Face Hub: pushed with a card of what was measured, and pulled."""

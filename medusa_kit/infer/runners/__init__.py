"""Which verifier runs a model on its machine, and one whose forwards have an adapter."""

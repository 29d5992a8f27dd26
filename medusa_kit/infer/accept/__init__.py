"""Which nodes are accepted: the rules, the choice of a token, the logits it is chosen from."""

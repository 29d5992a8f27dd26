"""Training in several processes: how they are launched, what they say to each other, DeepSpeed."""

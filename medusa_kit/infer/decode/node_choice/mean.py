"""Means that forget, of which everything that is learned while decoding is made."""

PRIOR = 10.0  # observations that an assumption, or what other texts have shown, counts for
MEMORY = 100.0  # observations that a mean is taken over, at most: texts and machines change


class Mean:
    """A mean in which the newest observation counts for 1/MEMORY at least. Not locked."""

    def __init__(self, value: float, weight: float) -> None:
        """`weight`: observations that the first value counts for."""
        self.value, self.weight = value, weight

    def record(self, value: float, share: float = 1.0) -> None:
        """Count an observation, or a share of one."""
        self.weight = min(self.weight + share, MEMORY)
        self.value += (value - self.value) * share / self.weight

    def forget(self) -> None:
        """From now on something else is observed, of which the past says little."""
        self.weight = min(self.weight, PRIOR)

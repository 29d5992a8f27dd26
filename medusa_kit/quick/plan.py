"""How the time is divided, as plain arithmetic on measured rates."""

import math
from dataclasses import asdict, dataclass

from medusa_kit.quick.settings import EPOCHS

# Shares of the whole time, and the most seconds that a longer time adds anything to.
SHARES = {"held_out": (0.06, 1800.0), "search": (0.08, 900.0), "verify": (0.04, 300.0),
          "bench": (0.08, 600.0)}  # fmt: skip
LAST = ("search", "verify", "bench")  # what follows training
STRETCH = 2.0  # they get at most so many times their share, where training ended early
OVERHEAD = 1.05  # of training: held-out scores, checkpoints
ANSWERED = 1e12  # answer tokens a second where answers are there already: they take no time
MIN_POSITIONS = 2_000  # heads trained on fewer do not predict anything


@dataclass(frozen=True)
class Rates:
    """Rates measured on this machine, a second."""

    answers: float  # answer tokens
    features: float  # tokens read for hidden states
    updates: float  # positions trained once
    row_tokens: float  # tokens of a row, its prompt included, for each of its answer
    answer_length: float  # tokens of an answer
    trained: float = 1.0  # positions trained for each of an answer, those of prompts included

    def training(self, positions: float, epochs: float) -> float:
        """Seconds of hidden states and updates, for so many positions of answers."""
        updates = epochs * self.trained / self.updates
        return positions * OVERHEAD * (self.row_tokens / self.features + updates)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def share(name: str, total: float) -> float:
    """Seconds that a phase gets, of `total`."""
    fraction, max_seconds = SHARES[name]
    return min(fraction * total, max_seconds)


def reserved(total: float) -> float:
    """Seconds for what follows training."""
    return sum(share(name, total) for name in LAST)


def positions_for(seconds: float, rates: Rates, written: float = 0.0) -> float:
    """Positions that can be written in `seconds`, the `written` ones among them, so that there is
    time to train on all of them."""
    training = rates.training(1.0, EPOCHS)
    remaining = seconds - written * training
    return written + max(0.0, remaining / (1.0 / rates.answers + training))


def epochs_for(seconds: float, positions: float, rates: Rates) -> float:
    """Epochs that fit into `seconds`, hidden states included; negative where not even these do."""
    features = positions * rates.row_tokens / rates.features
    return (seconds / OVERHEAD - features) * rates.updates / (positions * rates.trained)


def hours_for(seconds: float, spent: float) -> float:
    """Hours in all that leave `seconds` for answers and training after `spent` seconds, and the
    phases after them their shares."""
    return (spent + seconds) / (1.0 - sum(SHARES[name][0] for name in LAST)) / 3600


def rounded_up(hours: float) -> str:
    """Hours to two digits, as they are typed."""
    factor = 10.0 ** (1 - math.floor(math.log10(max(hours, 1e-3))))
    return f"{math.ceil(hours * factor) / factor:.12g}"


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def round_of(possible: float, batch: int, first: bool) -> int:
    """Prompts to answer before the rate is looked at again; 0: enough. `possible`: how many fit."""
    count = max(0, int(possible))
    if first:
        return min(count, batch)
    if count < max(1, batch // 4):  # too few to keep a batch busy
        return 0
    return count if count <= 3 * batch else max(batch, count // 2)

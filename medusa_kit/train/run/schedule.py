"""Schedules of the learning rate and of the heads' weight in Medusa-2's loss."""

import math

from medusa_kit.settings.recipe import JointSection, TrainSection


def learning_rate(train: TrainSection, step: int, num_updates: int) -> float:
    """The learning rate at update `step`, from 0: linear warm-up, then half a cosine down to 0."""
    warmup = round(train.warmup_ratio * num_updates)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_updates - warmup)
    return train.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def heads_weight(joint: JointSection, step: int, num_updates: int) -> float:
    """λ0 at update `step` (arXiv 2401.10774, §2.2.2): constant, or growing from near 0."""
    progress = (step + 1) / num_updates
    if joint.schedule == "linear":
        return joint.heads_weight * progress
    if joint.schedule == "sine":
        return joint.heads_weight * math.sin(0.5 * math.pi * progress)
    return joint.heads_weight

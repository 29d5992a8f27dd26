"""Why speeds that were measured may say little: few prompts, or answers that are loops alone."""

from medusa_kit import console

FEW = 6  # prompts, from which on a ratio has an interval (interval.py)


def says_nothing(num_prompts: int, loops: int) -> bool:
    """Whether no answer was timed but those that end in a loop."""
    return 0 < num_prompts <= loops


def doubt(num_prompts: int, loops: int) -> str | None:
    """What to think of a gain from so many prompts, `loops` of which have an answer that ends in a
    loop and is left out where there are others."""
    timed = num_prompts - loops
    if says_nothing(num_prompts, loops):
        which = "its answer is a loop" if num_prompts == 1 else "all answers end in loops"
        return (
            f"{console.counted(num_prompts, 'prompt')}, and {which}, which any drafter copies for "
            "nothing: no gain can be told"
        )
    if timed < FEW:
        return f"a gain of {console.counted(timed, 'prompt')} is chance: give {FEW} or more"
    return None

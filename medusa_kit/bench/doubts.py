"""Why speeds that were measured may say little: few prompts, or answers that are loops alone."""

from medusa_kit import console

FEW = 6  # prompts, from which on a ratio has an interval (interval.py)


def says_nothing(num_prompts: int, left_out: int) -> bool:
    """Whether no batch was timed but those with an answer that ends in a loop."""
    return 0 < num_prompts <= left_out


def doubt(num_prompts: int, loops: int, left_out: int) -> str | None:
    """What to think of a gain from so many prompts. `loops` of them have an answer that ends in a
    loop; their batches, of `left_out` prompts, are left out where there are others."""
    timed = num_prompts - left_out
    if says_nothing(num_prompts, left_out):
        which = "its answer is a loop" if num_prompts == 1 else "all answers end in loops"
        if loops < num_prompts:
            which = "each batch has an answer that ends in a loop"
        return (
            f"{console.counted(num_prompts, 'prompt')}, and {which}, which any drafter copies for "
            "nothing: no gain can be told"
        )
    if timed < FEW:
        return f"a gain of {console.counted(timed, 'prompt')} is chance: give {FEW} or more"
    return None

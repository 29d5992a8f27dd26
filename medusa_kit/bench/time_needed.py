"""A word on how long a measurement takes, for whoever waits for it."""

from medusa_kit import console

WAIT = 30.0  # seconds that are not worth a word


def say_how_long(seconds: float, by: str) -> None:
    """`by`: what the rest was judged by."""
    if seconds > WAIT:
        console.note(f"this takes about {seconds / 60:.1f} min, {by}")

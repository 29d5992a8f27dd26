"""Options that several commands share, so that they read the same everywhere."""

from typing import Annotated

import typer

DEFAULT_MODEL = "smollm2-135m-instruct"

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="Base model: a Hub id, a folder, a GGUF file, or the embedded one."
    ),
]
Heads = Annotated[
    str,
    typer.Option(
        help="Heads: auto (paired or shipped ones), none, untrained, a folder or a Hub id."
    ),
]
Tree = Annotated[str | None, typer.Option(help="Tree file; the one beside the heads unless given.")]
DType = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Force = Annotated[
    bool, typer.Option("--force", help="Put heads on a base with another fingerprint.")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; above 0 samples, exactly.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the K likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample within this share of probability.")]
Seed = Annotated[int, typer.Option(help="Same seed, same text, whatever the tree.")]


def heads_argument(heads: str) -> str | None:
    """What `medusa_kit.load` is given for `--heads`."""
    return None if heads == "none" else heads

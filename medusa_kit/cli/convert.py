"""`medusa-kit convert`: heads from and to the checkpoint formats of other engines."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_kit import console
from medusa_kit.cli import options

Source = Annotated[
    str, typer.Argument(metavar="SRC", help="Heads in any known format: a folder or a Hub id.")
]
Folder = Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")]
To = Annotated[
    str,
    typer.Option(
        metavar="FORMAT",
        help="Format to write: vllm, tgi, lorax, trt-llm, mlc, modelopt, fd-v1, fd-v2 "
        "(FasterDecoding) or medusa-kit.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Base model, to check sizes; needed for medusa-kit, and where its vocabulary matrix "
        "is written or compared.",
    ),
]
BaseName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name of the base model for the other engine.")
]
Layout = Annotated[
    str,
    typer.Option(
        help="For tgi and lorax: v1 (each head has a vocabulary matrix), v2 (heads use the base's) "
        "or auto (v2 where the heads use the base's)."
    ),
]
DType = Annotated[str, typer.Option(help="Dtype in which the base is read; heads keep theirs.")]


def convert(
    source: Source,
    folder: Folder,
    to: To,
    model: Model = None,
    base_name: BaseName = None,
    layout: Layout = "auto",
    dtype: DType = "float32",
    revision: options.Revision = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it holds heads.")] = False,
) -> None:
    """Convert heads between engines' formats; logits stay the same, bit for bit.

    The source is recognised by its tensors. What a format cannot hold exactly is refused with the
    reason. On stdout: the command that serves what was written, or converts it further.
    """
    from medusa_kit.base.loading import load_base_model
    from medusa_kit.heads.convert import check_call, check_source
    from medusa_kit.heads.convert import convert as run
    from medusa_kit.heads.formats.files import local_heads_folder

    place = local_heads_folder(source)
    check_call(place, folder, to, layout, force)
    check_source(place, to)
    base = None
    if model is not None:
        base = load_base_model(model, dtype=dtype, device="cpu", revision=revision)
    heads, written = run(
        place,
        folder,
        to,
        base=base,
        base_name=base_name,
        layout=layout,
        force=force,
    )
    console.note(f"read {heads.format}: {heads.describe()}")
    _report(folder, to, written)


def _report(folder: Path, to: str, written: Any) -> None:
    for line in written.notes:
        console.note(line)
    console.note(f"wrote {folder} for {to}")
    if written.command is not None:
        typer.echo(shlex.join(written.command))

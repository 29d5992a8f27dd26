"""`medusa-kit push` and `medusa-kit pull`: heads on the Hugging Face Hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_kit import console
from medusa_kit.errors import UsageError

Name = Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repository on the Hub.")]


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that holds the heads.")],
    name: Name,
    private: Annotated[
        bool, typer.Option("--private", help="Make the new repository private.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Branch to push to; created if missing.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files and the card without uploading.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a repository that holds something else.")
    ] = False,
    bench: Annotated[
        list[Path] | None,
        typer.Option(help="Another bench.json than that in DIR; may be repeated."),
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(help="The report of `verify --output`; default: DIR/verify.json.")
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="The base model's Hub id, if the heads name none."),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(help="The heads' licence, as the Hub names it, such as apache-2.0."),
    ] = None,
    data_license: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The licence of the training data.")
    ] = None,
) -> None:
    """Upload heads with a card of what was measured. The token is HF_TOKEN or `hf auth login`'s."""
    from medusa_kit.base.hub_client import HubName
    from medusa_kit.hub.card import CardOptions
    from medusa_kit.hub.folder import left_out, upload_files
    from medusa_kit.hub.licences import check_licence
    from medusa_kit.hub.measured import read_measured
    from medusa_kit.hub.push import push as run

    target = HubName.parse(name)
    if target.revision is not None:
        raise UsageError(f"{name!r} has a revision", hint="name the branch with --revision")
    if base_model is not None:
        HubName.parse(base_model)
    check_licence(license)
    target = HubName(target.repository, revision)
    measured = read_measured(folder, bench or (), verify)
    options = CardOptions(target.repository, revision, base_model, license, data_license)
    files = upload_files(measured, options)
    _warn_of_missing(options, measured, left_out(measured, files))
    if dry_run:
        _show(files, target)
        return
    address = run(files, target, measured.config, private=private, force=force)
    typer.echo(address)


def pull(
    name: Annotated[
        str, typer.Argument(metavar="ORG/NAME[@REVISION]", help="Repository on the Hub.")
    ],
    destination: Annotated[
        Path | None,
        typer.Argument(metavar="DEST", help="Folder to create; default: NAME in this folder."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace what an earlier pull wrote.")
    ] = False,
) -> None:
    """Download heads into a folder. Run it again after an interruption to resume."""
    from medusa_kit.base.hub_client import HubName
    from medusa_kit.hub.pull import pull as run

    typer.echo(run(HubName.parse(name), destination, force))


def _warn_of_missing(options: Any, measured: Any, left_out: Sequence[str]) -> None:
    if left_out:
        console.note(f"stays here: {', '.join(left_out)}")
    if options.base_of(measured) is None:
        console.warn(
            f"the base model {measured.config.base_model_name!r} is no Hub id: the card links to "
            "none (--base-model ORG/NAME)"
        )
    if options.license is None:
        console.warn("the card says licence unknown (--license)")
    if options.data_license is None:
        console.note("the licence of the training data is not recorded (--data-license)")
    missing = [
        command
        for command, measurements in (
            ("tree-search", measured.replayed),
            ("bench --output", measured.benches),
            ("verify --output", measured.verify),
        )
        if not measurements
    ]
    if missing:
        console.warn(
            "the card says not measured where these have left no file: " + ", ".join(missing)
        )


def _show(files: Sequence[Any], target: Any) -> None:
    rows = [(file.name, f"{file.size:,}") for file in files]
    rows.append(("in all", f"{sum(file.size for file in files):,}"))
    console.err.print(console.table(f"would go to {target}", ("file", "bytes"), rows))
    card = next(file for file in files if file.name == "README.md")
    typer.echo(card.content.decode(), nl=False)

"""What is uploaded of a heads folder: files on a fixed list, local paths cut to their last part."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from medusa_kit.heads.checkpoint import CONFIG_NAME, FORMAT, WEIGHTS_NAME
from medusa_kit.heads.derived import TREE_NAME
from medusa_kit.hub.card import CardOptions, render_card
from medusa_kit.hub.measured import (
    BENCH_NAME,
    PROVENANCE_NAME,
    STATISTICS_NAME,
    VERIFY_NAME,
    Measured,
)
from medusa_kit.hub.redact_paths import redact_paths
from medusa_kit.store.beside import found_beside
from medusa_kit.tree.statistics import RankStatistics

CARD_NAME, RECIPE_NAME = "README.md", "recipe.yaml"
TREE_PICTURE, BENCH_PICTURE = "tree.png", "bench.png"


@dataclass(frozen=True)
class UploadFile:
    """A file of the repository: its name there, and its content."""

    name: str
    content: Path | bytes

    @property
    def size(self) -> int:
        return self.content.stat().st_size if isinstance(self.content, Path) else len(self.content)


def upload_files(measured: Measured, options: CardOptions) -> list[UploadFile]:
    """Every file to upload, the card first."""
    files = [UploadFile(WEIGHTS_NAME, measured.folder / WEIGHTS_NAME), *_reports(measured)]
    pictures = {path.name: path for path in _pictures(measured) if path.is_file()}
    files += [UploadFile(name, path) for name, path in pictures.items()]
    card = render_card(measured, replace(options, pictures=list(pictures)))
    config = {"format": FORMAT, **redact_paths(measured.config.as_dict())}
    return [
        UploadFile(CARD_NAME, card.encode()),
        UploadFile(CONFIG_NAME, _json(config)),
        *files,
    ]


def _pictures(measured: Measured) -> Iterator[Path]:
    """Pictures of the figures on the card, each beside its figures, without those that show a local
    path."""
    if measured.plan is not None:
        yield found_beside(measured.folder, TREE_NAME).with_name(TREE_PICTURE)
    if (measured.folder / BENCH_NAME).is_file():
        report = measured.benches[0]
        drawn = [report.about.base.get("name"), *(result.name for result in report.results)]
        if redact_paths(drawn) == drawn:
            yield measured.folder / BENCH_PICTURE


def left_out(measured: Measured, files: Sequence[UploadFile]) -> list[str]:
    """What is in the folder and is not uploaded."""
    names = {file.name for file in files}
    return sorted(
        path.name for path in measured.folder.iterdir()
        if path.name not in names and not path.name.startswith(".")
    )  # fmt: skip


def _reports(measured: Measured) -> Iterator[UploadFile]:
    if measured.tree:
        yield UploadFile(TREE_NAME, _json(redact_paths(measured.tree)))
    elif measured.plan is not None:  # a bare list of paths
        yield UploadFile(TREE_NAME, found_beside(measured.folder, TREE_NAME))
    statistics = found_beside(measured.folder, STATISTICS_NAME)
    if statistics.is_file():
        yield _statistics(statistics)
    if measured.provenance is not None:
        yield UploadFile(PROVENANCE_NAME, _json(redact_paths(measured.provenance)))
    if measured.recipe is not None:
        text = yaml.safe_dump(redact_paths(measured.recipe), sort_keys=False)
        yield UploadFile(RECIPE_NAME, text.encode())
    for index, report in enumerate(measured.benches):
        yield UploadFile(bench_name(index), _json(redact_paths(report.to_json())))
    if measured.verify:
        parts = {how: part.to_json() for how, part in measured.verify.items()}
        yield UploadFile(VERIFY_NAME, _json(redact_paths(parts)))


def bench_name(index: int) -> str:
    """bench.json, then bench-2.json and so on."""
    return BENCH_NAME if not index else f"bench-{index + 1}.json"


def is_known(name: str) -> bool:
    """Whether a file of this name in a repository is one that push writes."""
    fixed = (CARD_NAME, CONFIG_NAME, WEIGHTS_NAME, TREE_NAME, STATISTICS_NAME, PROVENANCE_NAME,
             RECIPE_NAME, VERIFY_NAME, TREE_PICTURE, BENCH_PICTURE)  # fmt: skip
    return name in fixed or (name.startswith("bench") and name.endswith(".json"))


def _statistics(path: Path) -> UploadFile:
    """The file as it is, unless its notes name a local path."""
    statistics = RankStatistics.load(path)
    meta = redact_paths(statistics.meta)
    if meta == statistics.meta:
        return UploadFile(STATISTICS_NAME, path)
    return UploadFile(STATISTICS_NAME, replace(statistics, meta=meta).as_bytes())


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()

"""`medusa-kit tree-search`: the candidate tree that suits this model on this machine."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_kit import console
from medusa_kit.cli import engine_options, options
from medusa_kit.errors import ConfigError, DataError, TreeError, UsageError, WriteError
from medusa_kit.paths import expanded

OF_ENGINE = ("config", "model", "revision", "dtype", "device", "heads", "force")
# What an engine file may say too. Its drafter and its tree are of no use here.
OF_FILE = ("weights", "activations", "cache", "attention", "fixed_shapes", "compiled")
MIN_ROWS = 2
PROMPTS_INSTEAD = "give prompts with --prompts, and the model answers them"
STATISTICS_NAME = "statistics.npz"  # that of tuning/results.py, which loads torch


@engine_options.with_engine(argument=False, only=OF_ENGINE)
def tree_search(
    loading: engine_options.Loading = engine_options.GIVEN,
    prompts: Annotated[
        str | None, options.prompts_option(", which the model answers for calibration first")
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(help="Saved answers, as `data generate` writes them.")
    ] = None,
    statistics: Annotated[
        Path | None, typer.Option(help="Saved statistics; default: those next to the heads.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Nodes of the tree, root included; default: as many as are fastest."
        ),
    ] = None,
    choices: Annotated[
        Path | None, typer.Option(help="Evaluate this tree instead (a medusa_choices list).")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Sizes to compare, in nodes, root included.")] = (
        "1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64"
    ),
    batch_sizes: Annotated[
        str, typer.Option(help="Find a tree for each of these batch sizes, and for one prompt.")
    ] = "1",
    dynamic: Annotated[
        bool,
        typer.Option(help="Compare dynamic trees too; calibration takes longer."),
    ] = True,
    output: Annotated[
        Path | None, options.output_option("Folder for the results; default: that of the heads.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 192,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take this many prompts or answers; default: all.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 16,
) -> None:
    """Find the tree with the most tokens a second: statistics, sorting, replay, step times."""
    heads = loading["heads"] or "none"
    _check_together(prompts, answers, statistics, choices, nodes, batch_sizes)
    from medusa_kit.data.without_template import tell_template
    from medusa_kit.tuning.tree_search import judge_tree, search_tree

    _check_replaced(heads, output)
    tree_sizes, batches = _numbers("sizes", sizes), _numbers("batch sizes", batch_sizes)
    given_tree = _read_choices(choices) if choices is not None else None
    calibration = _calibration_data(heads, prompts, answers, statistics, limit)
    if given_tree is None and isinstance(calibration, list):
        _check_number(calibration)
    _check_alone(heads, output)
    engine = _engine(loading)
    tell_template(engine.base.tokenizer, engine.base.info.name)
    with_dynamic = dynamic and given_tree is None and not engine.verifier.chains_only
    dynamic_nodes = max(*tree_sizes, nodes or 2, 2) if with_dynamic else None
    if answers is not None:
        check_answers(answers, engine.base)
    with _output_folder(output, engine) as folder:
        if prompts is not None:
            calibration = _answers(engine, folder, calibration, max_new_tokens, batch_size)
        stats = _statistics(engine, folder, calibration, prompts or str(answers), dynamic_nodes)
        compared = stats if given_tree is not None or dynamic else replace(stats, entries_PK=None)
        search = (search_tree(engine, compared, tree_sizes, nodes, batches) if given_tree is None
                  else judge_tree(engine, stats, given_tree))  # fmt: skip
        _show(engine, search)
        answered = None if prompts is None else _gathered(engine, folder, max_new_tokens)
        _write(engine, search, folder, stats, answered)


def _check_together(
    prompts: str | None,
    answers: Path | None,
    statistics: Path | None,
    choices: Path | None,
    nodes: int | None,
    batch_sizes: str,
) -> None:
    if sum(given is not None for given in (prompts, answers, statistics)) > 1:
        raise UsageError("give only one of --prompts, --answers and --statistics")
    if choices is not None and batch_sizes != "1":
        raise UsageError("--choices judges one tree, for one prompt at a time: no --batch-sizes")
    if choices is not None and nodes is not None:
        raise UsageError("--choices judges one tree as it is: no --nodes")


def _engine(loading: engine_options.Loading) -> Any:
    """The tree beside the heads is not read: it may be of heads that were there before."""
    from medusa_kit.engine.load import load
    from medusa_kit.tree.candidate_tree import CandidateTree

    used = loading.keys() & {"model", *OF_ENGINE, *OF_FILE}
    return load(**{name: loading[name] for name in used}, tree=CandidateTree.root_only())


def _check_replaced(heads: str, output: Path | None) -> None:
    """Results of earlier searches are replaced, and nothing else."""
    from medusa_kit.store.beside import results_folder
    from medusa_kit.tuning.results import check_results

    beside = expanded(heads)
    if output is not None or (beside / "config.json").is_file():
        check_results(output or results_folder(beside))


def _check_alone(heads: str, output: Path | None) -> None:
    """A search that another one is in the way of is refused before a base is loaded, where the
    folder is known by then."""
    from medusa_kit.store.beside import is_searched

    beside = expanded(heads)
    known = output is not None or (beside / "config.json").is_file()
    if known and is_searched(beside, output):
        raise _another(output or heads)


def _another(where: object) -> ConfigError:
    return ConfigError(
        f"another process is finding a tree for the heads in {where}",
        hint="wait for it, or name another folder with --output",
    )


@contextlib.contextmanager
def _output_folder(output: Path | None, engine: Any) -> Iterator[Path]:
    """The folder for the results: that of the heads, or one in the cache folder where that is a
    package's, a snapshot of the Hub or read-only."""
    from filelock import Timeout

    from medusa_kit.store.beside import results_of

    heads = engine.heads_source
    if output is None and heads is None:
        raise UsageError("these heads lie in no folder", hint="name one with --output")
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(results_of(Path(heads or ""), output))
        except Timeout as error:
            raise _another(output or heads) from error
        except OSError as error:
            raise WriteError(
                f"no results can be written for the heads in {output or heads}: {error}",
                hint="name another folder with --output",
            ) from error
        yield folder


def _numbers(what: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{what} {text!r}: expected numbers with commas between") from error
    if min(numbers) < 1:
        singular = what.removesuffix("s")
        raise UsageError(f"{singular} {min(numbers)} is out of range; expected 1 or more")
    return numbers


def _calibration_data(
    heads: str,
    prompts: str | None,
    answers: Path | None,
    statistics: Path | None,
    limit: int | None,
) -> Any:
    """The data to calibrate on, read before a base is loaded: rows of prompts or answers,
    statistics, or None for the statistics beside the heads. Raises DataError, CheckpointError.
    """
    from medusa_kit.data.readers import AnswerRow, read_good_and_bad, read_rows
    from medusa_kit.data.rows import EXAMPLES
    from medusa_kit.tree.statistics import RankStatistics

    if prompts is not None:
        return list(read_good_and_bad(prompts, limit, extras=True))
    if statistics is not None:
        return RankStatistics.load(_existing(statistics))
    if answers is None:
        _check_beside(heads)
        return None
    rows = list(read_rows(str(answers), limit=limit))
    if wrong := next((row for row in rows if not isinstance(row, AnswerRow)), None):
        raise DataError(
            f"{answers}: row {wrong.row} holds no token ids",
            hint="answers come from `medusa-kit data generate`; give prompts as --prompts; "
            f"{EXAMPLES}",
        )
    _check_rows(answers)
    return rows


def _check_number(rows: list[Any]) -> None:
    from medusa_kit.data.readers import BadRow

    usable = sum(not isinstance(row, BadRow) for row in rows)
    if usable < MIN_ROWS:
        raise TreeError(
            f"there are {usable} prompts or answers to find a tree on; expected at least "
            f"{MIN_ROWS}, since some are held out",
            hint="give more, or a larger --limit",
        )


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UsageError(
            f"no statistics at {path}", hint="give --prompts or --answers to calibrate on"
        )
    return path


def _check_beside(heads: str) -> None:
    """For heads in a folder or on the Hub, missing statistics are reported before a base is
    loaded."""
    from medusa_kit.base.hub_client import on_hub
    from medusa_kit.heads.formats.files import local_heads_folder
    from medusa_kit.store.beside import found_beside

    folder = expanded(heads) if on_hub(heads) is None else local_heads_folder(heads)
    if (folder / "config.json").is_file():
        _existing(found_beside(folder, STATISTICS_NAME))


def _answers(engine: Any, folder: Path, rows: Any, max_new_tokens: int, batch_size: int) -> Any:
    """The model's answers to these prompts and no others. They gather in a hidden folder, where an
    interrupted search goes on; those of an earlier search serve where they are to the same."""
    from medusa_kit.data.readers import AnswerRow, read_rows
    from medusa_kit.distill.generate import generate_answers
    from medusa_kit.tuning.results import ANSWERS_NAME

    path, before = _gathered(engine, folder, max_new_tokens), folder / ANSWERS_NAME
    generate_answers(
        engine.base, rows, path, max_new_tokens=max_new_tokens, batch_size=batch_size,
        earlier=[before] if before.is_file() else [],
    )  # fmt: skip
    return [row for row in read_rows(str(path)) if isinstance(row, AnswerRow)]


def _gathered(engine: Any, folder: Path, max_new_tokens: int) -> Path:
    """Where answers gather: apart from those of a search with other settings."""
    from medusa_kit.base.origin import digest_of
    from medusa_kit.store.beside import GATHERED
    from medusa_kit.tuning.results import ANSWERS_NAME

    base = engine.base
    settings = digest_of(
        [base.info.fingerprint, base.computation, base.info.dtype, max_new_tokens]
    )[:8]
    return folder / GATHERED / settings / ANSWERS_NAME


def _check_rows(answers: Path) -> None:
    """Raises ConfigError for rows that were not made as the settings beside them say."""
    from medusa_kit.data.answer_settings import compared_rows, read_settings, tell_doubtful

    settings = read_settings(answers)
    if settings is not None:
        hint = f"remove these rows, or {PROMPTS_INSTEAD}"
        tell_doubtful(answers, compared_rows(answers, settings, hint))


def check_answers(answers: Path, base: Any) -> None:
    """Raises ConfigError for answers of another base, or to prompts tokenized differently.
    Those of another quantisation are used, and one line says so."""
    from medusa_kit.base.fingerprint import Match, compare
    from medusa_kit.base.origin import BASE, check_origin
    from medusa_kit.data.answer_settings import read_settings

    settings = read_settings(answers) or {}
    check_origin(answers, settings, base.origin, PROMPTS_INSTEAD)
    now = base.info.fingerprint
    if compare(settings.get(BASE) or now, now) is Match.SAME_NORMS:
        console.note(
            f"{answers} holds answers of another quantisation of {base.info.name!r}, or of a "
            "model fine-tuned with its norms and biases: acceptance may differ on its own text"
        )


def _statistics(
    engine: Any, folder: Path, calibration: Any, source: str, dynamic_nodes: int | None
) -> Any:
    """The statistics, loaded or measured on answers, whose name is `source`. `dynamic_nodes`: size
    of dynamic trees to record, if any."""
    from medusa_kit.store.beside import found_beside
    from medusa_kit.tree.statistics import RankStatistics
    from medusa_kit.tuning.results import take_statistics

    if calibration is None:
        heads = Path(engine.heads_source or folder)
        return RankStatistics.load(_existing(found_beside(heads, STATISTICS_NAME)))
    if isinstance(calibration, RankStatistics):
        return calibration
    return take_statistics(engine, calibration, None, source, dynamic_nodes)


def _read_choices(path: Path) -> Any:
    from medusa_kit.tree.candidate_tree import load_tree

    if not path.is_file():
        raise TreeError(f"no tree file at {path}")
    return load_tree(path)[0]


def _write(engine: Any, search: Any, folder: Path, statistics: Any, answers: Path | None) -> None:
    """The tree, and all that it was found from, together. `answers`: those of this search."""
    import shutil

    from medusa_kit.store.beside import GATHERED
    from medusa_kit.tuning.results import write_search

    write_search(engine, search, folder, statistics, answers)
    shutil.rmtree(folder / GATHERED, ignore_errors=True)


def _show(engine: Any, search: Any) -> None:
    from medusa_kit.tree.render import describe_tree

    several = len(search.by_batch) > 1
    rows = [
        (
            _named(row, several) + (" ←" if row in search.by_batch else ""),
            f"{row.acceptance_length:.3f}",
            f"{row.step_seconds * 1e3:.1f}",
            f"{row.speed_up:.2f} ×",
        )
        for row in search.rows
    ]
    columns = ("nodes", "acceptance length", "step, ms", "predicted speed-up")
    what = "Chains" if engine.verifier.chains_only else "Trees"
    console.out.print(console.table(f"{what}, by replay on held-out answers", columns, rows))
    drawn = describe_tree(search.plan.for_batch(1))
    console.out.print(drawn, markup=False, highlight=False)
    if 1 < search.decoded.num_nodes < search.chosen.num_nodes:
        console.note(
            "decoding verifies only the nodes that are worth their cost: "
            f"{search.decoded.num_nodes} at these times, predicted {search.decoded.speed_up:.2f} ×"
        )
    if search.decoded.num_nodes == 1:
        none = f"no {what.lower().removesuffix('s')}"
        console.warn(f"{none} gains on this machine: the engine will decode plainly")


def _named(row: Any, several: bool) -> str:
    batch = f", batch {row.batch_size}" if several else ""
    return f"{row.num_nodes}{' dynamic' if row.dynamic else ''}{batch}"

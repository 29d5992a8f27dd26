"""A tree is found on the prompts that are named, and what a search leaves belongs together."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.debug_model import MODEL

from medusa_kit.base.loading import load_tokenizer
from medusa_kit.cli.tree_search import _statistics as take_statistics
from medusa_kit.errors import WriteError
from medusa_kit.tree.statistics import RankStatistics

Run = Callable[..., tuple[int, str, str]]
OPTIONS = (*MODEL, "-n", "6", "--sizes", "1,2", "--no-dynamic")


@pytest.fixture
def heads(trained: Path, tmp_path: Path) -> Path:
    """With a tree that was found on other prompts."""
    return Path(shutil.copytree(trained, tmp_path / "heads"))


def written(folder: Path, words: str, count: int = 4) -> Path:
    path = folder / f"{words}.txt"
    path.write_text("".join(f"{words} {number}\n" for number in range(count)))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def asked(heads: Path) -> list[str]:
    tokenizer = load_tokenizer("debug-tiny")
    rows = (heads / "calibration_answers.jsonl").read_text().splitlines()
    return [tokenizer.decode(json.loads(row)["prompt_ids"]) for row in rows]


def test_each_search_is_on_its_own_prompts(run: Run, heads: Path, tmp_path: Path) -> None:
    search = ["tree-search", *OPTIONS, "--heads", heads, "--prompts"]
    for words, limit in (("aa", []), ("bb", []), ("bb", ["--limit", "2"]), ("aa", [])):
        assert run(*search, written(tmp_path, words), *limit)[0] == 0
        statistics = RankStatistics.load(heads / "statistics.npz")
        count = 2 if limit else 4
        assert (statistics.num_answers, len(asked(heads))) == (count, count)
        assert all(words in text for text in asked(heads))
        tree = json.loads((heads / "tree.json").read_text())
        assert tree["statistics"] == statistics.digest
        assert tree["heads"] == statistics.meta["heads"] is not None
    assert not list(heads.glob(".*"))
    assert not list(heads.glob("*.earlier*"))


def test_a_search_that_fails_leaves_what_was_there(
    run: Run, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = ["tree-search", *OPTIONS, "--heads", heads, "--prompts"]
    before = files(heads)
    code, _, err = run(*search, written(tmp_path, "one", count=1))
    assert (code, "expected at least 2, since some" in err) == (2, True)
    assert not list(heads.glob(".*"))
    assert files(heads) == before

    def fail(*_: object) -> None:
        raise WriteError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("medusa_kit.tuning.results.save_plan", fail)
        assert run(*search, written(tmp_path, "more"))[0] == 1
    assert files(heads) == before
    assert run(*search, written(tmp_path, "more"), "-n", "5")[0] == 0  # other settings than those
    assert all("more" in text for text in asked(heads))


@pytest.mark.parametrize("output", [False, True])
def test_a_second_search_in_a_folder_is_refused(
    run: Run, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: bool
) -> None:
    folder, seconds = (tmp_path / "out") if output else heads, []
    to = ["--output", folder] if output else []
    search = ["tree-search", *OPTIONS, "--heads", heads, *to, "--prompts"]

    def search_meanwhile(*arguments: object) -> RankStatistics:
        if not seconds:
            seconds.append(None)
            seconds[0] = run(*search, written(tmp_path, "bb"))
        return take_statistics(*arguments)

    monkeypatch.setattr("medusa_kit.cli.tree_search._statistics", search_meanwhile)
    assert run(*search, written(tmp_path, "aa"))[0] == 0
    code, _, err = seconds[0]
    assert (code, f"the heads in {folder}" in err.replace("\n", " ")) == (2, True)
    assert all("aa" in text for text in asked(folder))
    assert not list(folder.glob(".*"))


def test_answers_that_are_there_are_not_asked_again(run: Run, heads: Path, tmp_path: Path) -> None:
    search = ["tree-search", *OPTIONS, "--heads", heads, "--prompts"]
    assert run(*search, written(tmp_path, "aa"))[0] == 0
    rows = (heads / "calibration_answers.jsonl").read_text().splitlines()
    assert run(*search, written(tmp_path, "aa", count=6))[0] == 0
    assert (heads / "calibration_answers.jsonl").read_text().splitlines()[:4] == rows


def test_statistics_of_heads_that_were_there_before_are_refused(
    run: Run, heads: Path, tmp_path: Path
) -> None:
    """And the tree beside them does not keep a search with prompts from running."""
    statistics = RankStatistics.load(heads / "statistics.npz")
    text = json.loads((heads / "tree.json").read_text())
    other = {**statistics.meta, "heads": "1:other"}
    RankStatistics(statistics.ranks_PK, statistics.starts, statistics.num_ranks, other).save(
        heads / "statistics.npz"
    )
    (heads / "tree.json").write_text(json.dumps({**text, "heads": "1:other"}))
    search = ["tree-search", *OPTIONS, "--heads", heads]
    code, _, err = run(*search)
    said = f"{heads / 'statistics.npz'} was made with other heads"
    assert (code, "".join(said.split()) in "".join(err.split())) == (2, True)
    code, _, err = run("generate", "Hi", *MODEL, "--heads", heads, "-n", "2")
    assert (code, "made with other heads" in err) == (2, True)
    assert run(*search, "--prompts", written(tmp_path, "aa"))[0] == 0
    assert run("generate", "Hi", *MODEL, "--heads", heads, "-n", "2")[0] == 0


@pytest.mark.parametrize("part", ["base_fingerprint", "encoding"])
def test_answers_of_another_base_or_encoding_are_refused(
    run: Run, heads: Path, tmp_path: Path, part: str
) -> None:
    """A file that does not say whose answers it holds has one line."""
    answers = tmp_path / "answers.jsonl"
    shutil.copy(heads / "calibration_answers.jsonl", answers)
    settings = json.loads((heads / "calibration_answers.jsonl.meta.json").read_text())
    beside = tmp_path / "answers.jsonl.meta.json"
    beside.write_text(json.dumps({**settings, part: "1:another:one"}))
    search = ["tree-search", *OPTIONS, "--heads", heads, "--answers", answers]
    before = files(heads)
    code, _, err = run(*search)
    assert (code, "answers.jsonl was made with another" in err) == (2, True)
    assert files(heads) == before
    beside.unlink()
    code, _, err = run(*search)
    assert (code, err.count("answers.jsonl does not say with which base model")) == (0, 1)


@pytest.mark.parametrize("edited", [False, True])
def test_rows_that_were_not_made_as_their_settings_say(
    run: Run, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: bool
) -> None:
    """Those of another model are refused before a base is loaded; a person's have one line."""
    monkeypatch.setattr("medusa_kit.base.names._cached", lambda: ["no/such-model"])
    source = heads / "calibration_answers.jsonl"
    beside = heads / "calibration_answers.jsonl.meta.json"
    if edited:
        rows = [json.loads(line) for line in source.read_text().splitlines()]
        rows[2]["response_ids"][0] ^= 1
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        settings = json.loads(beside.read_text())
        beside.write_text(json.dumps({**settings, "base_fingerprint": "2:another:one"}))
    before = files(heads)
    model = MODEL if edited else ("-m", "no/such-model")
    options = (*model, *OPTIONS[len(MODEL) :], "--output", tmp_path / "out")
    code, _, err = run("tree-search", *options, "--heads", heads, "--answers", source)
    assert code == (0 if edited else 2)
    assert ("row 3 (edited since)" if edited else "made with another base model") in " ".join(
        err.split()
    )
    assert files(heads) == before

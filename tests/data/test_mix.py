"""Rows drawn from several sources: their shares, their order, and that none is lost."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.data.chat import encode_rows
from medusa_kit.data.mix import Stop, mix_rows, recipe_rows
from medusa_kit.data.readers import AnswerRow, Conversation
from medusa_kit.errors import DataError
from medusa_kit.settings.recipe import DataSection, TrainRecipe
from medusa_kit.train.trainer import load_examples


def source(name: str, count: int | None) -> Iterator[Conversation]:
    """`count` rows, without end for None."""
    row = 0
    while row != count:
        row += 1
        yield Conversation([], row, None, name)


def drawn(
    sizes: dict[str, tuple[int | None, float]],
    seed: int = 0,
    limit: int | None = None,
    stop: Stop = "exhaust",
) -> list[tuple[str, int]]:
    sources = [(source(name, count), weight) for name, (count, weight) in sizes.items()]
    return [(row.source, row.row) for row in mix_rows(sources, seed, limit, stop)]


def four_sigma(share: float, draws: int) -> float:
    """Draws are independent, so a count is binomial: beyond this once in 16,000 times."""
    return 4 * math.sqrt(share * (1 - share) / draws)


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (0.5, 0.2, 0.3), (20, 1)])
def test_shares_are_near_the_weights(weights: tuple[float, ...]) -> None:
    draws = 4000
    for seed in range(5):
        rows = drawn({str(i): (None, w) for i, w in enumerate(weights)}, seed, draws)
        counts = Counter(name for name, _ in rows)
        for i, weight in enumerate(weights):
            share = weight / sum(weights)
            assert abs(counts[str(i)] / draws - share) < four_sigma(share, draws)
        halves = [Counter(name for name, _ in half) for half in (rows[:2000], rows[2000:])]
        share = weights[0] / sum(weights)
        for half in halves:  # interleaved, not one block after the other
            assert abs(half["0"] / 2000 - share) < four_sigma(share, 2000)


def test_the_seed_and_the_weights_decide_the_order() -> None:
    sizes: dict[str, tuple[int | None, float]] = {"a": (50, 2), "b": (80, 1)}
    assert drawn(sizes, seed=3) == drawn(sizes, seed=3)
    assert drawn(sizes, seed=3) != drawn(sizes, seed=4)
    assert drawn(sizes, seed=3, limit=20) == drawn(sizes, seed=3)[:20]
    names = "".join(name for name, _ in drawn(sizes, seed=3, limit=24))
    assert names == "aaaaaaabaababaaaababbaba", "the same on every machine and Python"


@pytest.mark.parametrize("seed", range(5))
def test_exhaust_gives_every_row_once_and_in_order(seed: int) -> None:
    sizes: dict[str, tuple[int | None, float]] = {"a": (40, 1), "b": (7, 5), "c": (90, 0.25)}
    rows = drawn(sizes, seed)
    for name, (count, _) in sizes.items():
        assert count is not None
        assert [row for source, row in rows if source == name] == list(range(1, count + 1))
    assert len(rows) == 137
    assert max(i for i, (name, _) in enumerate(rows) if name == "b") < 40, "b drops out early"


@pytest.mark.parametrize("seed", range(5))
def test_stop_at_first_ends_with_the_first_dry_source(seed: int) -> None:
    sizes: dict[str, tuple[int | None, float]] = {"a": (None, 1), "b": (60, 1)}
    rows = drawn(sizes, seed, limit=1000, stop="stop_at_first")
    assert [row for name, row in rows if name == "b"] == list(range(1, 61))
    assert rows == drawn({"a": (None, 1), "b": (None, 1)}, seed, limit=len(rows))
    endless = {"a": (None, 1.0), "b": (None, 1.0)}
    following = drawn(endless, seed, limit=len(rows) + 1)[-1]
    assert following == ("b", 61), "the draw that ended it"


def test_no_more_rows_are_read_than_are_drawn() -> None:
    read: list[int] = []

    def counting() -> Iterator[Conversation]:
        for row in source("a", None):
            read.append(row.row)
            yield row

    rows = list(mix_rows([(counting(), 1), (source("b", None), 1)], 0, 30))
    assert len(rows) == 30
    assert len(read) == sum(row.source == "a" for row in rows)


# As a recipe asks for it.


def files(folder: Path, **sizes: int) -> dict[str, str]:
    paths = {}
    for name, count in sizes.items():
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"{name}!"}]
        path = folder / f"{name}.jsonl"
        path.write_text((json.dumps({"messages": messages}) + "\n") * count)
        paths[name] = str(path)
    return paths


def order(sources: list[Any], seed: int = 0, **options: Any) -> str:
    """Names of the sources, one letter a row."""
    rows = recipe_rows(DataSection(sources=sources, **options), seed)
    return "".join(Path(row.source).stem for row in rows)


def test_equal_weights_and_no_limit_read_one_after_the_other(tmp_path: Path) -> None:
    paths = files(tmp_path, a=3, b=5)
    a, b = paths["a"], paths["b"]
    assert order([a, b]) == "aaabbbbb"
    assert order([b, {"source": a, "limit": 2}]) == "bbbbbaa"
    assert order([b], limit=2) == "bb"
    assert order([{"source": b, "weight": 3, "limit": 4}], limit=3) == "bbb"
    assert order([{"source": b, "limit": 4}], limit=5) == "bbbb"


def test_weights_a_limit_or_the_stop_mix_the_sources(tmp_path: Path) -> None:
    paths = files(tmp_path, a=40, b=40)
    a, b = paths["a"], paths["b"]
    for sources, options in (
        ([a, {"source": b, "weight": 2}], {}),
        ([a, b], {"limit": 30}),
        ([a, b], {"mix": "stop_at_first"}),
    ):
        mixed = order(sources, **options)
        assert "ab" in mixed
        assert "ba" in mixed
        assert mixed == order(sources, **options)
        assert mixed != order(sources, seed=1, **options)
    assert len(order([a, b], limit=30)) == 30
    assert Counter(order([a, {"source": b, "weight": 2}])) == {"a": 40, "b": 40}
    assert Counter(order([a, {"source": b, "weight": 2, "limit": 9}])) == {"a": 40, "b": 9}
    assert len(order([a, b], mix="stop_at_first")) < 80


def test_every_source_of_a_stream_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def read(name: str, limit: int | None, streaming: bool, extras: bool) -> Iterator[Conversation]:
        calls.append((name, limit, streaming))
        return source(name, limit)

    monkeypatch.setattr("medusa_kit.data.mix.read_good_and_bad", read)
    sources = ["a/b", {"source": "c/d", "limit": 4}, {"source": "e/f", "limit": 99}]
    assert len(order(sources, streaming=True, limit=20)) == 20
    assert calls == [("a/b", 20, True), ("c/d", 4, True), ("e/f", 20, True)]


# What training is told about its rows.


def recipe(sources: list[Any], **options: Any) -> TrainRecipe:
    raw = {"output_dir": "unused", "base": {"model": "unused"},
           "data": {"sources": sources, **options}}  # fmt: skip
    return TrainRecipe.model_validate(raw)


@pytest.fixture
def base() -> Any:
    info = SimpleNamespace(name="this", context_length=64, vocab_size=259, fingerprint="f1")
    return SimpleNamespace(tokenizer=byte_tokenizer(), info=info, encoding="1:ids:turns")


def test_training_says_once_what_it_reads(
    tmp_path: Path, base: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = files(tmp_path, a=3, b=5)
    examples = load_examples(base, recipe(list(paths.values())))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    trained, tokens = 8 * 3, sum(len(example.input_ids) for example in examples)
    assert captured.err.startswith(
        f"8 rows, {trained} trained tokens ({trained / tokens:.1%} of {tokens}); "
    )
    assert "0 truncated at 64 tokens, 0.0% of" in captured.err, "the context is shorter than 2048"
    length = len(examples[0].input_ids) - 2
    load_examples(base, recipe(list(paths.values()), max_length=length))
    assert f"8 truncated at {length} tokens, 66.7% of the trained" in capsys.readouterr().err


def test_training_warns_of_skipped_rows_and_refuses_an_empty_source(
    tmp_path: Path, base: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = files(tmp_path, a=3, b=0)
    bad = Path(paths["b"])
    bad.write_text('{"prompt": "no answer"}\n')
    with pytest.raises(DataError, match="no row is left to train on") as caught:
        load_examples(base, recipe(list(paths.values())))
    assert caught.value.message.startswith(f"{bad}: ")
    assert "row 1 has no assistant turn" in caught.value.message
    bad.write_text(bad.read_text() + Path(paths["a"]).read_text())
    assert len(load_examples(base, recipe(list(paths.values())))) == 6
    assert "warning: 1 rows skipped, the first is row 1: it has" in capsys.readouterr().err
    with pytest.raises(DataError, match="row 1 has no assistant turn"):
        load_examples(base, recipe(list(paths.values()), on_error="fail"))


def answer_rows(path: Path, *responses: list[int]) -> str:
    rows = [{"prompt_ids": [1, 2], "response_ids": ids, "finish_reason": "stop"}
            for ids in responses]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_token_that_the_model_does_not_have_is_named_with_its_row(
    tmp_path: Path, base: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = answer_rows(tmp_path / "a.jsonl", [3, 258], [3, 259], [4])
    assert [example.row for example in load_examples(base, recipe([source]))] == [1, 3]
    told = "row 2 holds the token id 259; the model has ids 0 to 258"
    assert told.replace("row 2", "row 2: it") in capsys.readouterr().err
    with pytest.raises(DataError, match=told):
        load_examples(base, recipe([source], on_error="fail"))
    negative = AnswerRow([1], [2, -7], "stop", None, 5)
    with pytest.raises(DataError, match="row 5 holds the token id -7"):
        encode_rows([negative], base.tokenizer, 64, "fail", 259)


def test_answers_of_another_base_are_told(
    tmp_path: Path, base: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = answer_rows(tmp_path / "a.jsonl", [3], [4])
    meta = tmp_path / "a.jsonl.meta.json"
    for settings, warned in [
        ({"base_fingerprint": "f1"}, False),
        ({"endpoint_model": "served"}, False),
        ({"base_fingerprint": "f2"}, True),
    ]:
        meta.write_text(json.dumps(settings))
        assert len(load_examples(base, recipe([source, source]))) == 4
        err = capsys.readouterr().err
        assert err.count(f"warning: {source} holds the answers of another base") == warned
        assert ("fingerprint f2; 'this' has f1" in err) == warned


def test_answers_to_prompts_that_were_encoded_otherwise_are_told(
    tmp_path: Path, base: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = answer_rows(tmp_path / "a.jsonl", [3], [4])
    for settings, told in [
        ({"encoding": "1:ids:turns"}, ""),
        ({"encoding": "1:ids:others"}, ""),  # the rows are tokens already
        ({"encoding": "1:others:turns"}, "holds answers to prompts that were tokenized"),
        ({}, "does not say whether it holds answers to prompts that were tokenized"),
    ]:
        (tmp_path / "a.jsonl.meta.json").write_text(
            json.dumps({"base_fingerprint": "f1"} | settings)
        )
        load_examples(base, recipe([source, source]))
        err = capsys.readouterr().err
        assert err.count("another tokenizer") == bool(told)
        assert f"warning: {source} {told}" in err or not told


def test_the_recipes_seed_decides_the_mix(tmp_path: Path, base: Any) -> None:
    paths = files(tmp_path, a=20, b=20)
    mixed = recipe(list(paths.values()), limit=20)

    def texts(seed: int) -> list[list[int]]:
        seeded = mixed.model_copy(update={"seed": seed})
        return [example.input_ids for example in load_examples(base, seeded)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)

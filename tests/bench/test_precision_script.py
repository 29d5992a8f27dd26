"""benchmarks/precision.py: which answers an arithmetic changes, where, and by which margin."""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels.rounded_engine import needs_integers, quantised_base, rounded_engine
from support.small_engines import random_prompt

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
ANSWER = [1, 2, 0]
EXACT_TV = torch.tensor([[0.0, 5.0, 1.0], [1.0, 0.0, 1.25], [4.0, 3.0, 0.0]])
SECOND_TV = EXACT_TV + torch.tensor([[0.0], [1.0], [0.0]]) * torch.tensor([1.0, 0.0, 0.0])
LAST_TV = EXACT_TV + torch.tensor([[0.0], [0.0], [1.0]]) * torch.tensor([0.0, 2.0, 0.0])


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


class Fixed:
    """Reads the same logits in any text."""

    def __init__(self, logits_TV: torch.Tensor) -> None:
        self.logits_TV = logits_TV
        self.read_tokens = list[int]()

    def read(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        self.read_tokens.append(len(answer))
        return self.logits_TV[: len(answer)]


def test_bounds_are_wilsons(script: Any) -> None:
    for found, low, high in ((0, 0.0, 0.0370), (50, 0.4038, 0.5962), (100, 0.9630, 1.0)):
        assert script("changed_answers").wilson(found, 100) == pytest.approx((low, high), abs=1e-4)


def test_the_first_token_that_differs_counts_with_float32s_margin(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 reads as far as some arithmetic differs, and the first answers whole."""
    precision = script("precision")
    monkeypatch.setattr(precision, "WHOLE", 1)
    exact = Fixed(EXACT_TV)
    others = {"same": Fixed(EXACT_TV), "second": Fixed(SECOND_TV), "last": Fixed(LAST_TV)}
    compared = precision.Comparison(exact, others)
    compared.add([0], ANSWER)
    compared.add([0], ANSWER)
    others["last"].logits_TV = EXACT_TV
    compared.add([0], ANSWER)
    assert exact.read_tokens == [3, 3, 2]
    assert compared.whole == pytest.approx([4.0, 0.25, 1.0])
    assert not compared.left
    found = compared.found
    assert (found["same"].answers, found["same"].tokens, found["same"].places) == (3, 9, [])
    assert (found["second"].differ, found["second"].places) == (3, [1, 1, 1])
    assert found["second"].margins == pytest.approx([0.25] * 3)


def test_behind_a_token_that_float32_would_not_choose_nothing_counts(script: Any) -> None:
    """An answer of another machine's float32 may go another way at a near tie."""
    precision = script("precision")
    compared = precision.Comparison(
        Fixed(EXACT_TV), {"as told": Fixed(SECOND_TV), "last": Fixed(LAST_TV)}
    )
    compared.add([0], [1, 0, 0])
    assert compared.left == [(1, pytest.approx(0.25))]
    assert compared.found["as told"].places == [1]  # float32 here has another token there
    assert compared.found["last"].places == []


@needs_integers
def test_reading_on_after_a_common_beginning_changes_nothing(script: Any, tmp_path: Path) -> None:
    engine = rounded_engine(quantised_base(tmp_path), "int8", heads=None)
    precision = script("precision")
    texts = [([1, 2, 3, *random_prompt(4, seed)], random_prompt(3, seed + 9)) for seed in (1, 2)]
    one = precision.Ours(engine.verifier, 16)
    together = [one.read(*text) for text in texts]
    for text, logits_TV in zip(texts, together, strict=True):
        assert torch.equal(precision.Ours(engine.verifier, 16).read(*text), logits_TV)
    assert len(together[0]) == 3


def test_rows_are_drawn_by_a_fixed_seed(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt_ids": [number], "response_ids": [number] * 9} for number in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    drawn = script("precision").answers(path, 5, 4)
    assert drawn == script("precision").answers(path, 5, 4) != [([n], [n] * 4) for n in range(5)]
    assert [len(answer) for _, answer in drawn] == [4] * 5


def test_the_package_is_told_from_the_script_of_its_name(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), str(tmp_path)])
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    reader = script("llama_reader")
    with pytest.raises(SystemExit, match="pip install llama-cpp-python"):
        reader.package()
    (tmp_path / "llama_cpp.py").write_text("Llama = 'theirs'", encoding="utf-8")
    importlib.invalidate_caches()
    assert reader.package().Llama == "theirs"

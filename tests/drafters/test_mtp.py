"""MTP layers of a checkpoint as drafter: the drafts are those of transformers' own loop over the
same layers, and the answers are plain decoding's, whoever joins, leaves or runs out of context."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.native.answers import (
    check_a_seed,
    check_rows,
    drafts_looked_at,
    plain_answers,
    tokens_of,
)
from support.native.mtp_folders import change_config, mtp_folder, qwen_folder, without_tensors
from support.small_engines import build_engine, random_prompt
from support.tiny_models import CONTEXT
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator

from medusa_kit.base.loading import load_base_model
from medusa_kit.bench.bench import bench
from medusa_kit.bench.methods import standard_methods
from medusa_kit.bench.report import ONE_NODE
from medusa_kit.drafters.native.mtp_layers import layers_or_error
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import IncompatibleBaseError

# (family, layers in the checkpoint): one layer, and several, each of which reads the one before it
BASES = [("glm4_moe", 1), ("deepseek_v3", 1), ("deepseek_v3", 3)]
# The longest ends at the context's end; the second prompt has one token.
PROMPTS = [random_prompt(7, 1), random_prompt(1, 2), random_prompt(CONTEXT - 12, 3)]
TOKENS = 24


@pytest.fixture(
    scope="module", params=[*BASES, ("qwen3_5", 1)], ids=lambda one: "-".join(map(str, one))
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    family, layers = request.param
    folder = tmp_path_factory.mktemp("base")
    if family == "qwen3_5":
        qwen_folder(folder)
    else:
        mtp_folder(folder, family, layers)
    return build_engine(load_base_model(str(folder), device="cpu"))


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(engine.base.info.name)
    return plain_answers(model, PROMPTS, TOKENS)


def test_greedy_answers_are_plain_ones(engine: Engine, expected: list[list[int]]) -> None:
    num_tokens = 5  # more than there are layers
    given: Any = {"drafter": "mtp", "drafter_options": {"num_tokens": num_tokens}}
    together = engine.generate(PROMPTS, **given, max_new_tokens=TOKENS)
    assert tokens_of(together) == expected
    steps = [result.stats for result in together]
    assert max(one.acceptance_length for one in steps) > 1.3  # else nothing was tried here
    assert any(one.acceptance_length < num_tokens + 1 for one in steps)


def test_a_seed_says_the_same(engine: Engine) -> None:
    check_a_seed(engine, PROMPTS, "mtp", TOKENS)


def test_beside_other_sources(engine: Engine, expected: list[list[int]]) -> None:
    given: Any = {"drafter": "auto", "drafter_options": {"sources": ["mtp", "suffix"]}}
    assert tokens_of(engine.generate(PROMPTS, **given, max_new_tokens=TOKENS)) == expected


def test_rows_join_and_leave(engine: Engine, expected: list[list[int]]) -> None:
    check_rows(engine, PROMPTS, expected, "mtp", TOKENS)


def test_numbers_that_overflow_are_told_once(tmp_path: Path, engine: Engine) -> None:
    assert "NaN" not in " ".join(engine.generate([5, 6], drafter="mtp").stats.drafter_notes)
    mtp_folder(tmp_path, *BASES[0])
    spoiled = build_engine(load_base_model(str(tmp_path), device="cpu"))
    plain = spoiled.generate(PROMPTS, max_new_tokens=6, drafter="none")
    layers, _ = layers_or_error(spoiled.base, spoiled.memory)
    assert layers is not None
    for parameter in layers.layers.parameters():
        parameter.data.fill_(3e38)
    found = spoiled.generate(PROMPTS, max_new_tokens=6, drafter="mtp")
    assert tokens_of(found) == tokens_of(plain)
    for result in found:
        notes = [note for note in result.stats.drafter_notes if "NaN or infinite" in note]
        assert [note.partition(":")[0] for note in notes] == ["MTP layers"]


@pytest.fixture
def said() -> Iterator[list[list[int]]]:
    """What transformers' candidate generator drafts."""
    drafts, own = list[list[int]](), MTPCandidateGenerator.get_candidates

    def look(self: Any, input_ids: Any, *args: Any, **more: Any) -> Any:
        ids, logits = own(self, input_ids, *args, **more)
        if logits is not None:
            drafts.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MTPCandidateGenerator, "get_candidates", look)
        yield drafts


@pytest.mark.parametrize(("family", "layers"), BASES)
@pytest.mark.parametrize("knows", [True, False])
def test_drafts_are_those_of_transformers(
    family: str, layers: int, knows: bool, tmp_path: Path, said: list[list[int]]
) -> None:
    folder, prompt = mtp_folder(tmp_path, family, layers, knows), random_prompt(9, 4)
    model = AutoModelForCausalLM.from_pretrained(folder)
    numbers = "|".join(str(2 + index) for index in range(layers))
    model._keys_to_ignore_on_load_unexpected = {rf"layers\.({numbers})\."}
    ids = torch.tensor([prompt])
    more: Any = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
    model.generate(ids, **more, use_mtp=True)
    drafts = list[list[int]]()
    drafts_looked_at(
        build_engine(load_base_model(str(folder), device="cpu")), "mtp", [prompt], 40,
        lambda _, request, drafted: drafts.append(drafted), num_tokens=layers,
    )  # fmt: skip
    assert len(said) > 5
    assert drafts[: len(said)] == said[: len(drafts)]


def test_a_prompt_is_read_unless_a_cache_holds_it(engine: Engine) -> None:
    """What a layer has not read costs guesses alone."""
    prompt = random_prompt(30, 5)
    plain = engine.generate(prompt, drafter="none", max_new_tokens=8).token_ids
    more = [*prompt, *plain, 7]
    assert engine.generate(more, drafter="mtp", max_new_tokens=8).token_ids == (
        engine.generate(more, drafter="none", max_new_tokens=8).token_ids
    )


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda folder: without_tensors(folder, ".layers.2."),
            "lacks the 1 MTP layers that its config names",
        ),
        (lambda folder: without_tensors(folder, "eh_proj"), "cannot be loaded"),
        (lambda folder: change_config(folder, num_nextn_predict_layers=0), "has no layers for"),
        (lambda folder: change_config(folder, num_nextn_predict_layers="one"), "has no layers for"),
        (lambda folder: change_config(folder, num_nextn_predict_layers=-1), "has no layers for"),
    ],
)
def test_a_base_without_the_layers(spoil: Any, said: str, tmp_path: Path) -> None:
    spoil(mtp_folder(tmp_path))
    engine = build_engine(load_base_model(str(tmp_path), device="cpu"))
    with pytest.raises(IncompatibleBaseError, match=said) as failed:
        engine.generate(PROMPTS[0], drafter="mtp", max_new_tokens=4)
    assert str(tmp_path) in str(failed.value)
    assert "another drafter" in str(failed.value.hint)
    found = engine.generate(PROMPTS[0], drafter="auto", max_new_tokens=4)
    assert found.token_ids == engine.generate(PROMPTS[0], max_new_tokens=4).token_ids
    assert any(said in note for note in found.stats.drafter_notes) == ("has no" not in said)
    methods = standard_methods({"ours": engine}, None, 6)
    assert [method.name for method in methods] == [ONE_NODE]


def test_auto_asks_them(engine: Engine) -> None:
    found = engine.generate(PROMPTS[0], drafter="auto", max_new_tokens=TOKENS)
    assert not any("MTP" in note for note in found.stats.drafter_notes)
    assert "mtp" in found.stats.drafter


def test_bench_compares_them(engine: Engine) -> None:
    """Beside plain decoding, though nobody has asked for them by name."""
    methods = standard_methods({"ours": engine}, None, 6)
    assert [method.name for method in methods] == [ONE_NODE, "medusa-kit, mtp"]
    report = bench(methods, [[5, 6, 7], [40, 41]], 6)
    assert [result.total.identical for result in report.results] == [2, 2]

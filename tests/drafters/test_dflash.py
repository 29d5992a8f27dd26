"""DFlash drafts as drafter: the guesses are those of transformers' own assisted generation, and the
answers are plain decoding's, whoever joins, leaves or runs out of context."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.hybrids import tiny_hybrid
from support.native.answers import (
    check_a_seed,
    check_rows,
    drafts_looked_at,
    plain_answers,
    tokens_of,
)
from support.native.dflash_folders import BLOCK, authors_folder, dflash_folder
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import CONTEXT, EVERY, tiny_model
from transformers import MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.bench.bench import bench
from medusa_kit.bench.methods import standard_methods
from medusa_kit.engine.engine import Engine

VOCAB = 24  # few tokens: a random draft is right now and then
TOKENS = 24
# The last one ends at the context's end; the second has one token.
PROMPTS = [
    random_prompt(7, 1, VOCAB),
    random_prompt(1, 2, VOCAB),
    random_prompt(CONTEXT - 12, 3, VOCAB),
]


def small_base(family: str) -> BaseModel:
    make = tiny_model if family in EVERY else tiny_hybrid
    model = make(family, vocab_size=VOCAB, num_hidden_layers=3)
    model.generation_config.eos_token_id = None
    return wrap_model(model, None, family)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dflash_folder(tmp_path_factory.mktemp("draft"))


# Steps in C++, in torch, of fixed shapes, and of chains after a state.
CASES: dict[str, dict[str, Any]] = {"qwen3": {}, "olmoe": {}, "llama": {"fixed_shapes": "always"},
                                    "qwen3_next": {}}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest, folder: Path) -> Engine:
    base = small_base(request.param)
    return build_engine(base, draft_model=str(folder), **CASES[request.param])


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[list[int]]:
    return plain_answers(engine.base.model, PROMPTS, TOKENS)


def test_greedy_answers_are_plain_ones(engine: Engine, expected: list[list[int]]) -> None:
    together = engine.generate(PROMPTS, drafter="draft-model", max_new_tokens=TOKENS)
    assert tokens_of(together) == expected
    lengths = [result.stats.acceptance_length for result in together]
    assert max(lengths) > 1  # else nothing was tried here
    assert min(lengths) < BLOCK
    assert any("(DFlash)" in note for note in together[0].stats.drafter_notes)


def test_a_seed_says_the_same(engine: Engine) -> None:
    check_a_seed(engine, PROMPTS, "draft-model", TOKENS)


def test_beside_other_sources(engine: Engine, expected: list[list[int]]) -> None:
    found = engine.generate(PROMPTS, drafter="auto", max_new_tokens=TOKENS)
    assert tokens_of(found) == expected
    assert "draft-model" in found[0].stats.drafter


def test_stops(engine: Engine, expected: list[list[int]]) -> None:
    """The second token of the longest run ends an answer, wherever a draft would have gone on."""
    stop = expected[0][9]
    engine.base.model.generation_config.eos_token_id = stop
    try:
        found = engine.generate(PROMPTS[0], drafter="draft-model", max_new_tokens=TOKENS)
    finally:
        engine.base.model.generation_config.eos_token_id = None
    assert found.token_ids == expected[0][: expected[0].index(stop) + 1]


def test_rows_join_and_leave(engine: Engine, expected: list[list[int]]) -> None:
    check_rows(engine, PROMPTS, expected, "draft-model", TOKENS)


def test_a_prompt_is_read_unless_a_cache_holds_it(engine: Engine) -> None:
    """What a draft has not read costs guesses alone."""
    prompt = random_prompt(30, 5, VOCAB)
    draft: Any = {"drafter": "draft-model", "max_new_tokens": 8}
    first = engine.generate(prompt, **draft).token_ids
    more = [*prompt, *first, 7]
    plain = engine.generate(more, drafter="none", max_new_tokens=8, seed=1).token_ids
    assert engine.generate(more, **draft).token_ids == plain


@pytest.fixture
def said() -> Iterator[list[list[int]]]:
    """What transformers' candidate generator drafts."""
    drafts, own = list[list[int]](), DFlashTokenCandidateGenerator.get_candidates

    def look(self: Any, input_ids: Any, *args: Any, **more: Any) -> Any:
        ids, logits = own(self, input_ids, *args, **more)
        if logits is not None:
            drafts.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlashTokenCandidateGenerator, "get_candidates", look)
        yield drafts


@pytest.mark.parametrize("family", ["qwen3", "olmoe"])
@pytest.mark.parametrize("form", [dflash_folder, authors_folder])
def test_drafts_are_those_of_transformers(
    family: str, form: Any, tmp_path: Path, said: list[list[int]]
) -> None:
    """Longer than the window of the draft's own layers."""
    prompt, base = random_prompt(20, 4, VOCAB), small_base(family)
    kinds: Any = {} if form is dflash_folder else {"layer_types": ["full_attention"] * 2}
    theirs = MuseGlimmerAssistantModel.from_pretrained(dflash_folder(tmp_path / "one", **kinds))
    ids = torch.tensor([prompt])
    base.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False,
        assistant_model=theirs, speculation_type="dflash",
    )  # fmt: skip
    expected = list(said)
    engine, drafts = build_engine(base, draft_model=str(form(tmp_path / "two"))), list[list[int]]()
    drafts_looked_at(
        engine, "draft-model", [prompt], 60, lambda _, request, drafted: drafts.append(drafted)
    )
    assert len(expected) > 10
    assert len(set(map(tuple, expected))) > 5
    # Near its end transformers drafts as ever, and ours too: both are cut as answers are.
    assert drafts[: len(expected)] == expected[: len(drafts)]


def test_beside_heads(folder: Path) -> None:
    """Heads read hidden states, whatever is behind."""
    base = small_base("qwen3")
    heads = random_heads(base)
    engine = build_engine(base, heads=heads, tree=BUSHY, draft_model=str(folder))
    own = build_engine(base, heads=heads, tree=BUSHY)
    plain = [tokens_of(own.generate(PROMPTS, drafter=name, max_new_tokens=TOKENS))
             for name in ("none", "medusa")]  # fmt: skip
    assert plain[0] == plain[1]
    sources = {"sources": ["medusa", "draft-model"], "max_nodes": 40}
    found = engine.generate(PROMPTS, drafter="auto", drafter_options=sources, max_new_tokens=TOKENS)
    assert tokens_of(found) == plain[0]


def test_bench_compares_them(folder: Path) -> None:
    engine = build_engine(small_base("llama"), draft_model=str(folder))
    methods = standard_methods({"ours": engine}, None, 6, drafters=["draft-model"])
    report = bench(methods, [[5, 6, 7], [10, 11]], 6)
    assert [result.name for result in report.results][1:] == ["medusa-kit, draft-model"]
    assert [result.total.identical for result in report.results] == [2, 2]

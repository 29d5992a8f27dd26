"""EAGLE-3 drafts in the format of speculators as drafter: the drafts are those of a reference in
plain torch that reads the whole text anew, and the answers are plain decoding's, whoever joins,
leaves or runs out of context."""

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
from support.native.eagle_folders import PROPOSED, eagle_folder, reference_draft
from support.samples import pairs
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import CONTEXT, EVERY, tiny_model

import medusa_kit
from medusa_kit.base.files import stored_config
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.drafter import RequestText

VOCAB, KNOWN = 24, 20  # few tokens: a random draft is right now and then
LAYERS = 4
TOKENS = 24
# The last one ends at the context's end; the second has one token.
PROMPTS = [
    random_prompt(7, 1, VOCAB),
    random_prompt(1, 2, VOCAB),
    random_prompt(CONTEXT - 12, 3, VOCAB),
]
GIVEN: Any = {"drafter": "draft-model", "max_new_tokens": TOKENS}


def small_base(family: str) -> BaseModel:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS}
    if family in EVERY:
        model = tiny_model(family, **sizes)
    else:
        kinds = ["linear_attention"] * 2 + ["full_attention"] * 2
        model = tiny_hybrid(family, **sizes, layer_types=kinds)
    model.generation_config.eos_token_id = None
    return wrap_model(model, None, family)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle_folder(tmp_path_factory.mktemp("draft"), VOCAB, KNOWN)


# Steps in C++, in torch, of fixed shapes, and of chains after a state.
CASES: list[tuple[str, dict[str, Any]]] = [("llama", {}), ("olmoe", {}),
                                           ("llama", {"fixed_shapes": "always"}),
                                           ("qwen3_next", {})]  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=["C++", "torch", "fixed", "chains"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Engine:
    family, options = request.param
    return build_engine(small_base(family), draft_model=str(folder), **options)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[list[int]]:
    return plain_answers(engine.base.model, PROMPTS, TOKENS)


def test_greedy_answers_are_plain_ones(engine: Engine, expected: list[list[int]]) -> None:
    """Together, where rows advance by different amounts, and alone."""
    together = engine.generate(PROMPTS, **GIVEN)
    assert tokens_of(together) == expected
    assert [engine.generate(one, **GIVEN).token_ids for one in PROMPTS] == expected
    lengths = [result.stats.acceptance_length for result in together]
    assert max(lengths) > 1  # else nothing was tried here
    assert min(lengths) < 1 + PROPOSED
    assert any("(EAGLE-3)" in note for note in together[0].stats.drafter_notes)


def test_a_seed_says_the_same(engine: Engine) -> None:
    check_a_seed(engine, PROMPTS, "draft-model", TOKENS)


def test_beside_other_sources(engine: Engine, expected: list[list[int]]) -> None:
    found = engine.generate(PROMPTS, drafter="auto", max_new_tokens=TOKENS)
    assert tokens_of(found) == expected
    assert "EAGLE-3" in found[0].stats.drafter


def test_rows_join_and_leave(engine: Engine, expected: list[list[int]]) -> None:
    check_rows(engine, PROMPTS, expected, "draft-model", TOKENS)


Seen = list[tuple[list[int], list[int], int]]  # each draft: text with root, tokens, first token


def drafted_by(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[Seen, Any]:
    """What the drafter writes for each request, and the first token that it has seen of it; and the
    answers."""
    found = Seen()

    def look(drafter: Any, request: RequestText, drafted: list[int]) -> None:
        read = drafter.layers[0].lengths[request.kept[drafter].slots[0]]
        found.append(([*request.text, request.root], drafted, len(request.text) - read))

    return found, drafts_looked_at(engine, "draft-model", prompts, tokens, look)


def check(seen: Seen, folder: Path, model: Any, least: int) -> None:
    """All drafts are the reference's, and they differ."""
    assert len(seen) >= least
    assert len({tuple(drafted) for _, drafted, _ in seen}) > 3
    for text, drafted, first in seen:
        if drafted:
            assert drafted == reference_draft(folder, model, text, first, len(drafted))


# norm_before_residual, an embedding of its own, tokens that it knows, what it reads
FORMS: list[tuple[bool, bool, int, list[int]]] = [
    (False, True, KNOWN, [3, 1, 2]), (True, False, KNOWN, [2, 2, 1]), (True, True, VOCAB, [1, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "form"), pairs(["llama", "olmoe"], FORMS))
def test_drafts_are_those_of_the_reference(
    family: str, form: tuple[bool, bool, int, list[int]], tmp_path: Path
) -> None:
    residual, embedding, known, reads = form
    base = small_base(family)
    folder = eagle_folder(tmp_path, VOCAB, known, reads, embedding, norm_before_residual=residual)
    engine = build_engine(base, draft_model=str(folder))
    seen, _ = drafted_by(engine, PROMPTS, TOKENS)
    assert {first for _, _, first in seen} == {0}
    assert max(len(drafted) for _, drafted, _ in seen) == PROPOSED
    # Near the end of the context, where they are shorter.
    assert min(len(drafted) for text, drafted, _ in seen if len(text) > CONTEXT - 3) < PROPOSED
    check(seen, folder, base.model, 30)


def test_a_prompt_is_read_unless_a_cache_holds_it(engine: Engine, folder: Path) -> None:
    """What a draft has not read costs guesses alone, and nothing that it reads is out of place."""
    prompt = random_prompt(30, 5, VOCAB)
    given: Any = {"drafter": "draft-model", "max_new_tokens": 8}
    more = [*prompt, *engine.generate(prompt, **given).token_ids, 7, 9, 4]
    plain = engine.generate(more, drafter="none", max_new_tokens=8, seed=1).token_ids
    seen, answers = drafted_by(engine, [more], 8)
    assert answers == [plain]
    check(seen, folder, engine.base.model, 3)


def test_the_layers_of_its_authors(tmp_path: Path) -> None:
    """Where a config names none: after layer 2, the middle, and 3 before the last."""
    named = eagle_folder(tmp_path / "named", VOCAB, KNOWN, [2, 2, 1])
    silent = eagle_folder(tmp_path / "silent", VOCAB, KNOWN, eagle_aux_hidden_state_layer_ids=None)
    engine = build_engine(small_base("llama"), draft_model=str(silent))
    seen, _ = drafted_by(engine, PROMPTS[:1], TOKENS)
    check(seen, named, engine.base.model, 5)


def test_beside_heads(folder: Path) -> None:
    """Heads read hidden states, whatever is behind."""
    base = small_base("qwen3")
    heads = random_heads(base)
    engine = build_engine(base, heads=heads, tree=BUSHY, draft_model=str(folder))
    plain = tokens_of(engine.generate(PROMPTS, drafter="none", max_new_tokens=TOKENS))
    sources = {"sources": ["medusa", "draft-model"], "max_nodes": 40}
    found = engine.generate(PROMPTS, drafter="auto", drafter_options=sources, max_new_tokens=TOKENS)
    assert tokens_of(found) == plain


def test_loaded_by_name(tmp_path: Path) -> None:
    """Its config names no class that transformers knows."""
    base = stored_config("debug-tiny")
    assert base is not None
    layer = {"hidden_size": base.hidden_size}
    folder = eagle_folder(tmp_path, base.vocab_size, 9, [1], layer=layer)
    engine = medusa_kit.load("debug-tiny", draft_model=str(folder), device="cpu")
    found = engine.generate([5, 6, 7], drafter="draft-model", max_new_tokens=6)
    assert found.token_ids == engine.generate([5, 6, 7], drafter="none", max_new_tokens=6).token_ids


def test_in_bfloat16(folder: Path) -> None:
    model = tiny_model("llama", vocab_size=VOCAB, num_hidden_layers=LAYERS).to(torch.bfloat16)
    model.generation_config.eos_token_id = None
    engine = build_engine(wrap_model(model, None, "llama"), draft_model=str(folder))
    plain = engine.generate(PROMPTS[0], drafter="none", max_new_tokens=TOKENS)
    found = engine.generate(PROMPTS[0], **GIVEN)
    assert found.token_ids == plain.token_ids
    assert found.stats.acceptance_length > 1

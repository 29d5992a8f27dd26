"""Heads' layer over the prefix: what it gives at a node is what it gives for the whole text,
however that was read; and the base's own logits and tokens are the same to the bit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import tiny_base, tiny_model

from medusa_kit.base.model import BaseModel
from medusa_kit.engine.engine import Engine
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.cpu import kernels
from medusa_kit.infer.draft import Draft, State
from medusa_kit.infer.tree_step import Nodes
from medusa_kit.infer.verifier import Verifier

TOKENS = 9
CLOSE = {torch.float64: {"atol": 1e-9, "rtol": 1e-9}, torch.float32: {"atol": 2e-4, "rtol": 1e-3}}
ROUNDED: dict[str, float] = {"atol": 0.03, "rtol": 0.0}  # the layer's weights in C++
in_cpp = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)


def prefix_heads(base: BaseModel, **kinds: Any) -> MedusaHeads:
    return random_heads(base, prefix_layers=1, **kinds)


def engine_of(family: str, dtype: torch.dtype, kind: str = "medusa", **options: Any) -> Engine:
    base = tiny_base(family, dtype=dtype)
    base.model.generation_config.eos_token_id = None
    return build_engine(base, heads=prefix_heads(base, kind=kind), tree=BUSHY, **options)


def watched(engine: Engine) -> list[int]:
    """Lengths of the texts after which heads drafted, in each case from what they read of the whole
    text: the rows' hidden states are compared with those of `MedusaHeads.with_prefix`."""
    heads, lengths = engine.heads, list[int]()
    assert heads is not None
    closeness = [CLOSE[engine.base.dtype]] * 2
    if engine.verifier.steps_run_by.startswith("C++"):
        closeness[1] = ROUNDED
    make = engine._drafter

    def drafter(*args: Any, **kwargs: Any) -> Any:
        built = make(*args, **kwargs)
        propose = built.propose

        def checked(state: State) -> Draft:
            for row, text in enumerate(state.tokens):
                hidden_1TD = heads.base.hidden_states(torch.tensor([text]))
                expected_D = heads.with_prefix(hidden_1TD)[0, -1]
                for own, expected, close in zip(
                    state.hidden_BD[row].chunk(2), expected_D.chunk(2), closeness, strict=True
                ):
                    torch.testing.assert_close(own, expected, **close)
                lengths.append(len(text))
            return propose(state)

        built.propose = checked
        return built

    engine._drafter = drafter  # type: ignore[method-assign]
    return lengths


def plain(family: str, dtype: torch.dtype, prompts: Sequence[list[int]]) -> list[list[int]]:
    """By transformers' own generate on a model of its own."""
    model, answers = tiny_model(family).to(dtype), []
    model.generation_config.eos_token_id = None
    for prompt in prompts:
        out_1T = model.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )  # fmt: skip
        answers.append(out_1T[0, len(prompt) :].tolist())
    return answers


# In C++, in torch with the nodes of all rows as one, padded (Falcon), and in windows (Gemma 2).
CASES = [
    pytest.param("llama-tied", torch.float32, "hydra", marks=in_cpp, id="in-cpp"),
    pytest.param("llama-tied", torch.float64, "hydra", id="ragged"),
    pytest.param("falcon", torch.float64, "medusa", id="padded"),
    pytest.param("gemma2", torch.float32, "rooted", id="windows"),
    pytest.param("llama-tied", torch.float64, "recurrent", id="recurrent"),
]


@pytest.mark.parametrize(("family", "dtype", "kind"), CASES)
def test_drafts_read_the_whole_prefix(
    family: str, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of different lengths, read in pieces, by rows that join and leave, and prompts whose
    beginning an earlier request had read."""
    monkeypatch.setattr("medusa_kit.infer.verifier.PREFILL_CHUNK", 5)
    engine = engine_of(family, dtype, kind)
    in_cpp = engine.verifier.steps_run_by.startswith("C++")
    assert in_cpp == (family == "llama-tied" and dtype == torch.float32)
    lengths, shared = watched(engine), random_prompt(11, 0)
    prompts = [[*shared, *random_prompt(2 + 3 * seed, seed)] for seed in range(4)]
    results = engine.generate(prompts, max_new_tokens=TOKENS, batch_size=3)
    assert [one.token_ids for one in results] == plain(family, dtype, prompts)
    assert len(lengths) >= sum(result.stats.num_steps for result in results)
    text = list[int]()
    for turn in range(2):
        text += random_prompt(13, turn)
        result = engine.generate(text, max_new_tokens=TOKENS)
        assert (result.stats.cached_tokens >= 13 + TOKENS - 2) == (turn == 1)
        text += result.token_ids
    assert max(lengths) > 2 * 13 + TOKENS
    assert any(result.stats.acceptance_length > 1 for result in results)


@pytest.mark.parametrize(("family", "dtype", "kind"), CASES)
def test_logits_have_the_same_bits(family: str, dtype: torch.dtype, kind: str) -> None:
    engine = engine_of(family, dtype, kind)
    with_layer, without = engine.verifier, engine.verifier.without_prefix
    assert with_layer is not without
    prompts = [random_prompt(3, 1), random_prompt(9, 2)]
    trees = Nodes.chains([[5, 6, 7], [8]], engine.base.device)

    def scored(verifier: Verifier) -> tuple[torch.Tensor, ...]:
        cache = verifier.new_cache(2, 16)
        hidden_BD, logits_BV = verifier.read_prompts(cache, [0, 1], prompts)
        scores = verifier.score_trees(cache, trees, [0, 1])
        D = engine.base.info.hidden_size
        return hidden_BD[:, :D], logits_BV, scores.hidden_ND[:, :D], scores.logits_NV

    for ours, expected in zip(scored(with_layer), scored(without), strict=True):
        assert torch.equal(ours, expected)

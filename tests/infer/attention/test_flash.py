"""The split-and-merge path against SDPA and the formula; what goes to which backend, and why."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_inputs import H, qkv, step_of
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import tiny_base, tiny_model

import medusa_kit
from medusa_kit.engine import load as loading
from medusa_kit.errors import ConfigError
from medusa_kit.infer.attention import flash, triton_backend
from medusa_kit.infer.attention.backend import AttentionCall, Case
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.attention.flash import tree_flash
from medusa_kit.infer.attention.merge import merge
from medusa_kit.infer.attention.sdpa import tree_sdpa

LENGTHS = [[7, 3, 5], [0, 4, 0], [0, 0, 0], [9, 9, 9], [90, 2, 41]]
WINDOWS = [None, 1, 3, 6, 9, 40]


def random_tree(nodes: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return (-1, *(generator.randrange(-2, node) for node in range(1, nodes)))  # -2: unused


def by_version_2(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: Any,
    softmax_scale: float, causal: bool, softcap: float, return_softmax_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What flash-attn 2 returns: [B, R, G, E] in and out, +inf and zeros where there is no key."""
    assert not causal
    assert return_softmax_lse
    counts_B = torch.as_tensor(cache_seqlens, dtype=torch.int32).expand(len(q))
    assert int(counts_B.max()) <= k_cache.shape[1]
    scores = torch.einsum("brge,blge->bgrl", q, k_cache) * softmax_scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = torch.arange(k_cache.shape[1]) >= counts_B[:, None]
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    out = torch.einsum("bgrl,blge->brge", scores.softmax(-1).nan_to_num(0.0), v_cache)
    lse = scores.logsumexp(-1)
    return out, lse.masked_fill(lse == float("-inf"), float("inf"))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kernel", ["torch", "flash-attn"])
def test_equals_sdpa(monkeypatch: pytest.MonkeyPatch, kernel: str, lengths: list[int]) -> None:
    """Rows of different length, windows, groups, head sizes, sinks and caps, random trees."""
    if kernel == "flash-attn":
        monkeypatch.setattr(flash, "package", lambda *device: by_version_2)
    for seed, window in enumerate(WINDOWS):
        for groups, size, extra in [(1, 8, ""), (2, 40, "sinks"), (6, 3, ""), (3, 16, "softcap")]:
            if extra == "softcap" and kernel == "torch":
                continue
            step = step_of(lengths, random_tree(1 + 3 * seed, seed))
            query, key, value = qkv(step, groups, size)
            softcap = 2.0 if extra == "softcap" else None
            sinks = torch.randn(H) if extra == "sinks" else None
            call = AttentionCall(query, key, value, step, 0.3, window, softcap, sinks)
            torch.testing.assert_close(tree_flash(call), tree_sdpa(call), atol=2e-6, rtol=1e-5)


def test_the_kernel_runs_over_what_all_nodes_see_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call where flash-attn takes the rows' lengths, one a row where torch must; none empty."""
    calls: list[tuple[int, int]] = []
    kernel = flash._kernel

    def watched(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> Any:
        calls.append((query.shape[0], key.shape[2]))
        return kernel(query, key, *rest)

    monkeypatch.setattr(flash, "_kernel", watched)
    for lengths, window, expected in [
        ([7, 3], None, [(1, 7), (1, 3)]),
        ([5, 5], None, [(2, 5)]),
        ([0, 4], None, [(1, 4)]),
        ([0, 0], None, []),
        ([20, 20], 8, [(2, 2)]),  # the tree has 6 nodes: 2 slots are in every node's window
        ([20, 20], 6, []),
    ]:
        calls.clear()
        step = step_of(lengths)
        tree_flash(AttentionCall(*qkv(step, 2), step, 0.3, window))
        assert calls == expected, (lengths, window)
    monkeypatch.setattr(flash, "package", lambda *device: by_version_2)
    calls.clear()
    tree_flash(AttentionCall(*qkv(step_of([7, 0]), 2), step_of([7, 0]), 0.3))
    assert calls == [(2, 7)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_keeps_the_dtype_and_its_precision(dtype: torch.dtype) -> None:
    step = step_of([30, 11])
    query, key, value = qkv(step, 2, dtype=dtype)
    out = tree_flash(AttentionCall(query, key, value, step, 0.3))
    exact = tree_sdpa(AttentionCall(query.double(), key.double(), value.double(), step, 0.3))
    assert out.dtype == dtype
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-12}[dtype]
    assert float((out.double() - exact).abs().max()) < tolerance


def test_merging_parts_is_attention_over_all_of_them() -> None:
    """Parts of any size, far apart in weight, empty for some rows or for all, with and without
    sinks; what stands in the output of an empty part must not matter."""
    B, N, L = 3, 4, 12
    query, key, value = (torch.randn(B, 2, n, 5, dtype=torch.float64) for n in (N, L, L))
    key[:, :, :4] *= 30
    seen = torch.rand(B, 1, N, L) < 0.5
    seen[0, :, :, :4], seen[1] = False, False  # row 0: nothing in the first part; row 1: nowhere
    scores_BHNL = (query @ key.mT).masked_fill(~seen, float("-inf"))
    for sinks in (None, torch.tensor([0.5, -40.0], dtype=torch.float64)):
        parts = []
        for span in (slice(0, 4), slice(4, 5), slice(5, 12)):
            some = scores_BHNL[..., span]
            parts.append((some.softmax(-1) @ value[:, :, span], some.logsumexp(-1)))
        assert parts[0][0][0].isnan().all()
        columns = [scores_BHNL]
        if sinks is not None:
            columns.append(sinks.view(1, 2, 1, 1).expand(B, 2, N, 1))
        weights = torch.cat(columns, -1).softmax(-1).nan_to_num(0.0)[..., :L]
        merged = merge(parts, sinks)
        torch.testing.assert_close(merged, weights @ value, atol=1e-12, rtol=1e-12)
        assert merged[[0, 2]].all()
        assert not merged[1].any()
    halves = torch.rand(2, 3, 1, 1, 1, 2, dtype=torch.float64).unbind()
    one = [(out[0], torch.full((1, 1, 1), 2.0)) for out in halves]
    assert torch.equal(merge(one), (halves[0][0] + halves[1][0]) / 2)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3", "gpt2"])
def test_greedy_answers_are_those_of_transformers(family: str) -> None:
    """Rows of different length, prompts longer than the windows, whole steps with random heads."""
    base = tiny_base(family)
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY, attention="flash")
    prompts = [random_prompt(length, length) for length in (3, 17, 30)]
    for prompt, result in zip(prompts, engine.generate(prompts, max_new_tokens=20), strict=True):
        ids = torch.tensor([prompt])
        out = tiny_model(family).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
        )
        assert result.token_ids == out[0, len(prompt) :].tolist()
        assert (result.stats.attention, result.stats.attention_fallbacks) == ("flash", [])


# Which backend.

HALF = Case("cuda", torch.bfloat16, 64, 64)


@pytest.mark.parametrize(
    ("case", "expected", "why"),
    [
        (HALF, "triton", None),
        (replace(HALF, hides=False), "flash", None),
        (replace(HALF, hides=False, dtype=torch.float32), "triton", "flash: float32"),
        (replace(HALF, dtype=torch.float32, softcap=True, sinks=True), "triton", None),
        (replace(HALF, head_size=192), "triton", None),
        (replace(HALF, head_size=320, value_size=320), "sdpa", "triton: head size 320"),
        (replace(HALF, dtype=torch.float64), "sdpa", "triton: float64"),
        (Case("cpu", torch.float32, 64, 64), "sdpa", None),
    ],
)
def test_auto(gpu: None, case: Case, expected: str, why: str | None) -> None:
    attention = AttentionChoice("auto")
    assert attention.choose(case) == attention.name == expected
    assert any(why in line for line in attention.fallbacks) if why else not attention.fallbacks


def test_without_triton_flash_and_sdpa_share_the_work(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, "missing", lambda: ("triton is not installed", "triton"))
    attention = AttentionChoice("auto")
    assert attention.choose(HALF) == "flash"
    for changed, why in [
        ({"dtype": torch.float32}, "flash: float32"),
        ({"head_size": 20, "value_size": 20}, "flash: head size 20"),
        ({"head_size": 192}, "flash: keys of 192 numbers"),
        ({"softcap": True}, "no soft cap"),
    ]:
        assert attention.choose(replace(HALF, **changed)) == "sdpa"
        assert any(why in line for line in attention.fallbacks)
    assert attention.choose(replace(HALF, sinks=True)) == "flash"


def test_an_old_gpu_has_sdpa_alone(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flash, triton_backend):
        monkeypatch.setattr(module, "compute_capability", lambda index: (7, 5))
    assert AttentionChoice("auto").choose(HALF) == "sdpa"


def test_what_was_named_but_cannot_be_done_is_an_error(gpu: None) -> None:
    attention = AttentionChoice("flash")
    assert attention.choose(HALF) == "flash"
    with pytest.raises(ConfigError, match=r"'flash' .* float32 \(float16 and bfloat16 only\)"):
        attention.choose(Case("cuda", torch.float32, 64, 64))
    assert attention.report() == {"asked": "flash", "used": "flash", "fallbacks": []}


def test_a_named_backend_that_cannot_do_the_model_is_an_error() -> None:
    """Neither a layer that it cannot do nor a class with attention of its own goes on without."""
    with pytest.raises(ConfigError, match=r"'flash' was asked for, .* has no soft cap") as caught:
        build_engine(tiny_base("gemma2"), attention="flash")
    assert "attention auto" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="codegen computes its attention itself"):
        build_engine(tiny_base("codegen"), attention="flash")
    for family in ("gemma2", "codegen"):
        build_engine(tiny_base(family), attention="auto")


def test_what_no_model_can_have_is_told_before_one_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(triton_backend, "missing", lambda: None)
    monkeypatch.setattr(loading, "load_base_model", None)
    with pytest.raises(ConfigError, match=r"'triton' .* Triton kernels need a GPU"):
        medusa_kit.load("debug-tiny", attention="triton", device="cpu")


def test_unknown_and_missing_backends_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="expected one of auto, sdpa, flash, triton") as caught:
        AttentionChoice("flsh")
    assert caught.value.hint == "did you mean flash?"
    monkeypatch.setattr(triton_backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="triton is not installed") as caught:
        AttentionChoice("triton")
    assert "'.[triton]'" in str(caught.value.hint)
    assert triton_backend.unsupported(HALF) == "triton is not installed"

"""The check at load: lets through what is right, refuses what is wrong, and says how wrong."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import FAMILIES, coarse_base, tiny_base, tiny_model

from medusa_kit.base.layerwise import LayerwiseModel, layerwise_model
from medusa_kit.base.model import wrap_model
from medusa_kit.errors import CheckpointError, IncompatibleBaseError
from medusa_kit.infer import attention
from medusa_kit.infer.attention import step as tree_step
from medusa_kit.infer.chains.choice import self_check
from medusa_kit.infer.own_rounding import own_rounding
from medusa_kit.infer.self_check import check_trees
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_right_model_passes_within_a_small_tolerance(family: str) -> None:
    check = self_check(tiny_base(family))
    assert check.relative_error < 1e-4
    assert 0 < check.rounding_tolerance < 1e-2


def widen_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trees, not of the reference; the one of the self-check alone."""
    right = tree_step.TreeStep.mask
    wider = {4: 5, 64: 64, None: None}  # 4: the window of the self-check
    monkeypatch.setattr(
        tree_step.TreeStep, "mask", lambda step, window, *rest: right(step, wider[window], *rest)
    )


@pytest.mark.parametrize("family", ["mistral-sliding", "phimoe", "gpt_oss"])
def test_a_wrong_window_is_caught_though_the_real_one_is_longer_than_the_prompts(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = wrap_model(tiny_model(family, sliding_window=64))
    self_check(base)
    owners = [base.config, *base.model.modules()]
    assert {getattr(owner, "sliding_window", None) for owner in owners} == {None, 64}
    widen_the_window(monkeypatch)
    with pytest.raises(IncompatibleBaseError, match="off by"):
        self_check(base)


def test_a_fault_while_the_window_is_not_full_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks and kernels are others then; every answer begins so."""
    base = wrap_model(tiny_model("mistral-sliding", sliding_window=64))
    right = tree_step.TreeStep.mask

    def wrong(step: tree_step.TreeStep, window: int | None, *rest: int) -> torch.Tensor:
        mask = right(step, window, *rest).clone()
        if not step.window_applies(window):
            mask[..., 1:, 0] = False
        return mask

    monkeypatch.setattr(tree_step.TreeStep, "mask", wrong)
    with pytest.raises(IncompatibleBaseError, match="off by"):
        self_check(base)


def test_a_window_that_a_family_leaves_to_its_mask_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3.5-MoE never names its window to the attention function."""
    monkeypatch.setattr(attention, "_window_of_config", lambda module: None)
    with pytest.raises(IncompatibleBaseError, match="off by"):
        self_check(tiny_base("phimoe"))


def test_an_attention_that_can_neither_be_exchanged_nor_masked_is_refused() -> None:
    base = tiny_base("gptj")
    base.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(IncompatibleBaseError, match="GPTJForCausalLM does not let its attention"):
        Verifier(base)


def test_a_mask_that_lets_siblings_see_each_other_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a family drops the tree's mask and falls back on a causal one."""
    right = tree_step.TreeStep._build_mask

    def causal(step: tree_step.TreeStep, window: int | None) -> torch.Tensor:
        N = step.num_nodes
        chain = torch.ones(N, N, dtype=torch.bool).tril().expand_as(step.sees_BNN)
        return right(tree_step.TreeStep(step.lengths, step.depths_BN, chain), window)

    monkeypatch.setattr(tree_step.TreeStep, "_build_mask", causal)
    with pytest.raises(IncompatibleBaseError, match=r"logits on a tree are off by \d"):
        self_check(tiny_base("llama"))


def test_a_commit_that_keeps_the_wrong_nodes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(cache: TreeCache, moves: list[list[tuple[int, int]]]) -> None: ...

    monkeypatch.setattr(TreeCache, "_move", careless)
    with pytest.raises(IncompatibleBaseError, match="off by"):
        self_check(tiny_base("llama"))


def test_positions_by_slot_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a family counts positions itself instead of reading position_ids."""
    verifier = Verifier(tiny_base("llama"))
    model = verifier.base.model
    original = model.model.rotary_emb.forward

    def by_slot(x: torch.Tensor, position_ids: torch.Tensor) -> object:
        first = position_ids[:, :1]
        return original(x, first + torch.arange(position_ids.shape[1])[None])

    monkeypatch.setattr(model.model.rotary_emb, "forward", by_slot)
    with pytest.raises(IncompatibleBaseError, match="off by"):
        check_trees(verifier)


def test_plain_texts_are_read_together() -> None:
    """Plain forwards are nearly all of the time that the check takes."""
    base = tiny_base("mistral-sliding")
    plain: list[int] = []
    base.model.register_forward_hook(
        lambda _, args, options, out: plain.append(len(args)) if not options["use_cache"] else None,
        with_kwargs=True,
    )
    self_check(base)
    assert len(plain) == 3, "narrowed windows, one text beside the model's own cache, real windows"


@pytest.mark.parametrize("refuses", [False, True], ids=["computes-otherwise", "refuses"])
def test_a_model_that_minds_padding_is_checked_text_by_text(refuses: bool) -> None:
    base = tiny_base("llama")

    def mind(_: Any, args: tuple[torch.Tensor, ...], options: dict[str, Any], out: Any) -> None:
        if not options["use_cache"] and len(args[0]) > 1:
            if refuses:
                raise ValueError("one text at a time")
            out.logits += torch.arange(out.logits.shape[-1])

    base.model.register_forward_hook(mind, with_kwargs=True)
    assert self_check(base).relative_error < 1e-4


def layerwise(folder: Path, family: str, **changes: Any) -> tuple[Verifier, LayerwiseModel]:
    model = tiny_model(family, **changes)
    model.save_pretrained(folder)
    return Verifier(wrap_model(model)), layerwise_model(str(folder))


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "qwen2", "qwen3", "gemma3"])
def test_trees_may_be_held_against_the_model_in_pieces(family: str, tmp_path: Path) -> None:
    verifier, pieces = layerwise(tmp_path, family)
    whole, found = check_trees(verifier), check_trees(verifier, pieces)
    for check in (whole, found):
        assert check.relative_error < 1e-4
        assert 0 < check.rounding_tolerance < 1e-2


def test_a_wrong_tree_is_found_by_the_model_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, pieces = layerwise(tmp_path, "mistral-sliding", sliding_window=64)
    check_trees(verifier, pieces)
    widen_the_window(monkeypatch)
    with pytest.raises(IncompatibleBaseError, match="off by"):
        check_trees(verifier, pieces)


def test_other_weights_are_found_by_the_model_in_pieces(tmp_path: Path) -> None:
    verifier, pieces = layerwise(tmp_path, "llama")
    layer = verifier.base.model.model.layers[1]
    layer.mlp.up_proj.weight.data[3] = layer.mlp.up_proj.weight.data[4]
    check_trees(verifier)
    with pytest.raises(IncompatibleBaseError, match="off by"):
        check_trees(verifier, pieces)


def test_nan_is_no_small_error() -> None:
    base = tiny_base("llama")
    base.model.lm_head.weight.data[3, 3] = float("nan")
    with pytest.raises(CheckpointError):
        self_check(base)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_rounding_alone_does_in_16_bits_is_no_fault(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a model differs from itself as much without any tree; a wrong mask differs by more."""
    base = coarse_base(dtype)
    assert own_rounding(base) > 0.1  # on every processor; what a tree differs by hangs on it
    assert self_check(base).relative_error < 0.5
    right = tree_step.TreeStep.mask

    def wrong(step: tree_step.TreeStep, *rest: Any) -> torch.Tensor:
        mask = right(step, *rest).clone()
        for row, length in enumerate(step.lengths):
            mask[row, :, :, max(length - 1, 0)] &= length == 0
        return mask

    monkeypatch.setattr(tree_step.TreeStep, "mask", wrong)
    with pytest.raises(IncompatibleBaseError, match=r"off by .* \(allowed [345]e-01\)"):
        self_check(base)


def test_rounding_excuses_nothing_in_32_bits() -> None:
    with pytest.raises(IncompatibleBaseError, match=r"off by .* \(allowed 1e-03\)"):
        self_check(coarse_base(torch.float32))


def test_nan_with_the_real_windows_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a finite number `max` keeps that."""
    found = iter([(1e-6, 1e-6), (math.nan, math.nan)])
    monkeypatch.setattr("medusa_kit.infer.self_check._measure", lambda *_: next(found))
    base = wrap_model(tiny_model("mistral-sliding", sliding_window=64))
    with pytest.raises(IncompatibleBaseError, match="NaN or infinite"):
        check_trees(Verifier(base))

"""The Triton kernels against SDPA: on a GPU where there is one, else interpreted."""

from typing import Any

import pytest
import torch
from support.attention_inputs import DEVICE, needs_triton, parents_of, step_of
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.errors import ConfigError
from medusa_kit.infer.attention.backend import AttentionCall
from medusa_kit.infer.attention.sdpa import tree_sdpa
from medusa_kit.infer.attention.triton_backend import ancestor_words, tree_triton
from medusa_kit.infer.chains.choice import checked_verifier
from medusa_kit.infer.device.step import FixedStep


def test_ancestor_words_hold_every_pair() -> None:
    sees_BNN = step_of([3, 1], parents_of(130)).sees_BNN
    words_BNW = ancestor_words(sees_BNN)
    assert words_BNW.shape == (2, 130, 3)
    for node, other in [(0, 0), (129, 0), (63, 63), (64, 63), (129, 64), (129, 127), (128, 129)]:
        bit = int(words_BNW[0, node, other // 64]) >> other % 64 & 1
        assert bool(bit) is bool(sees_BNN[0, node, other]), (node, other)


@needs_triton
@pytest.mark.parametrize(
    ("lengths", "nodes", "heads", "groups", "window", "extra", "splits"),
    [
        ([9, 0], 6, 2, 1, None, "", 1),
        ([150, 3], 6, 2, 1, None, "softcap", 3),  # splits that hold no slot of a row
        ([70, 64], 6, 2, 2, 9, "", 2),
        ([70, 5], 6, 3, 1, 2, "sinks", 2),  # a window smaller than the tree is deep
        ([5], 66, 1, 1, None, "", 2),  # two words of ancestors, two tiles of rows
    ],
)
def test_equals_sdpa(
    lengths: list[int], nodes: int, heads: int, groups: int, window: int | None, extra: str,
    splits: int,
) -> None:  # fmt: skip
    step = step_of(lengths, parents_of(nodes))
    B, L, size, value_size = len(lengths), step.num_positions, 12, 20
    query = torch.randn(B, nodes, heads, size, device=DEVICE).transpose(1, 2)
    key = torch.randn(B, groups, L + 7, size, device=DEVICE)[:, :, :L]
    value = torch.randn(B, groups, L + 7, value_size, device=DEVICE)[:, :, :L]
    step.depths_BN, step.sees_BNN = step.depths_BN.to(DEVICE), step.sees_BNN.to(DEVICE)
    softcap = 2.0 if extra == "softcap" else None
    sinks = torch.randn(heads, device=DEVICE) if extra == "sinks" else None
    call = AttentionCall(query, key, value, step, 0.3, window, softcap, sinks)
    out = tree_triton(call, num_splits=splits)
    torch.testing.assert_close(out, tree_sdpa(call), atol=5e-6, rtol=1e-5)


@needs_triton
@pytest.mark.parametrize("window", [None, 9])
def test_lengths_are_read_on_the_device(window: int | None) -> None:
    """A step of fixed shapes knows no length on the host; all slots are in sight."""
    tree = step_of([70, 0], parents_of(6))
    lengths = torch.tensor([70, 0], device=DEVICE)
    depths, sees = tree.depths_BN.to(DEVICE), tree.sees_BNN.to(DEVICE)
    step = FixedStep(lengths, depths, sees, 128, None)
    query = torch.randn(2, 6, 2, 12, device=DEVICE).transpose(1, 2)
    key, value = torch.randn(2, 2, 1, 128, 12, device=DEVICE)
    call = AttentionCall(query, key, value, step, 0.3, window)
    out = tree_triton(call, num_splits=2)
    torch.testing.assert_close(out, tree_sdpa(call), atol=5e-6, rtol=1e-5)


class Watched:
    """In place of a kernel: runs it and keeps what it was launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, list[tuple[Any, Any]]()

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.kernel[grid](*arguments, **options)
            self.launches.append((arguments, options))

        return launch


@needs_triton
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (300, True)])
def test_every_program_works_however_large_the_cache(
    window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of splits is fixed when a step is captured, for all slots; each row's own length
    says what lies in them. Rows too short for all leave the rest empty."""
    from medusa_kit.infer.attention import triton_kernel

    watched = Watched(triton_kernel.split_kernel)
    monkeypatch.setattr(triton_kernel, "split_kernel", watched)
    tree = step_of([0, 0, 0], parents_of(6))
    lengths = torch.tensor([700, 30, 0], device=DEVICE)
    step = FixedStep(lengths, tree.depths_BN.to(DEVICE), tree.sees_BNN.to(DEVICE), 4096, None)
    query = torch.randn(3, 6, 2, 12, device=DEVICE).transpose(1, 2)
    key, value = torch.randn(2, 3, 1, 4096, 12, device=DEVICE)
    sinks_H = torch.randn(2, device=DEVICE) if sinks else None
    call = AttentionCall(query, key, value, step, 0.3, window, None, sinks_H)
    out = tree_triton(call, num_splits=8)
    torch.testing.assert_close(out, tree_sdpa(call), atol=5e-6, rtol=1e-5)
    lses_SX = watched.launches[0][0][7]
    busy_SB = lses_SX.view(8, 3, 12).isfinite().any(-1)  # a row of the batch has 2 · 6 rows
    assert busy_SB[:, 0].all()
    assert busy_SB.sum(0).tolist() == [8, 3, 1]  # 16 slots at least: 36 and 6 in all
    assert (lses_SX.view(8, 3, 12)[3:, 1:] == float("-inf")).all()


@needs_triton
@pytest.mark.parametrize("sinks", [False, True])
def test_any_number_of_splits_is_merged_by_the_same_kernel(
    sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of all splits is compiled anew for each number, and spills where they are many."""
    from medusa_kit.infer.attention import triton_kernel

    watched = Watched(triton_kernel.merge_kernel)
    monkeypatch.setattr(triton_kernel, "merge_kernel", watched)
    step = step_of([520], parents_of(2))
    step.depths_BN, step.sees_BNN = step.depths_BN.to(DEVICE), step.sees_BNN.to(DEVICE)
    query = torch.randn(1, 2, 1, 12, device=DEVICE).transpose(1, 2)
    key, value = torch.randn(2, 1, 1, step.num_positions, 12, device=DEVICE)
    sinks_H = torch.randn(1, device=DEVICE) if sinks else None
    call = AttentionCall(query, key, value, step, 3.0, None, None, sinks_H)
    for splits in (1, 2, 33):
        out = tree_triton(call, num_splits=splits)
        torch.testing.assert_close(out, tree_sdpa(call), atol=5e-6, rtol=1e-5)
    assert len({str(options) for _, options in watched.launches}) == 1


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [12, 200])
def test_every_tile_size_computes_the_same(size: int, dtype: torch.dtype) -> None:
    """One tile of rows, several, and one that is not full, by each way of cutting them. No
    bfloat16, whose products the interpreter gets wrong."""
    for nodes in (1, 5, 17):
        step = step_of([50], parents_of(nodes))
        step.depths_BN, step.sees_BNN = step.depths_BN.to(DEVICE), step.sees_BNN.to(DEVICE)
        query = torch.randn(1, nodes, 4, size, device=DEVICE).transpose(1, 2)
        key, value = torch.randn(2, 1, 1, step.num_positions, size, device=DEVICE)
        rounded = [tensor.to(dtype) for tensor in (query, key, value)]
        out = tree_triton(AttentionCall(*rounded, step, 0.1), num_splits=3)
        exact = tree_sdpa(AttentionCall(*(tensor.double() for tensor in rounded), step, 0.1))
        allowed = {torch.float16: 4e-3, torch.float32: 5e-6}[dtype]
        assert float((out.double() - exact).abs().max()) < allowed


@pytest.mark.slow
@needs_triton
def test_the_check_at_load_sees_rows_split_and_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the merge shows on prompts that are far too short to be split by themselves."""
    from medusa_kit.infer.attention import triton_kernel

    merge = triton_kernel.merge_kernel
    split = Watched(triton_kernel.split_kernel)

    class WrongWeights:
        def __getitem__(self, grid: Any) -> Any:
            def launch(partials: Any, lses_SX: Any, *rest: Any, **options: Any) -> None:
                lses_SX[1:] += 1.0
                merge[grid](partials, lses_SX, *rest, **options)

            return launch

    one = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    base = wrap_model(tiny_model("mistral-sliding", sliding_window=64, **one))
    checked_verifier(base, "triton")
    monkeypatch.setattr(triton_kernel, "merge_kernel", WrongWeights())
    monkeypatch.setattr(triton_kernel, "split_kernel", split)
    with pytest.raises(ConfigError, match=r"'triton' .* logits on a tree are off by"):
        checked_verifier(base, "triton")
    shapes = {
        (options["HAS_WINDOW"], len(arguments[6]) > 1) for arguments, options in split.launches
    }
    assert shapes == {(True, False), (True, True), (False, True)}

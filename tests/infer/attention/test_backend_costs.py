"""What backends launch for each layer, counted, and on which device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_inputs import needs_triton, parents_of, qkv, step_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_kit.infer.attention import triton_backend
from medusa_kit.infer.attention.backend import AttentionCall, Case
from medusa_kit.infer.attention.choice import BACKENDS, AttentionChoice
from medusa_kit.infer.attention.step import TreeStep

WITHOUT_A_KERNEL = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"}


class Counting(TorchDispatchMode):
    """Counts the operations that launch a kernel each: no views, no bare memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func._schema.name in WITHOUT_A_KERNEL)
        return func(*args, **(kwargs or {}))


def launches(name: str, step: TreeStep, window: int | None, patch: pytest.MonkeyPatch) -> int:
    """Kernels of one layer, after one that has made what all layers share."""
    from medusa_kit.infer.attention import triton_kernel

    counting = Counting()

    class Stub:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **options: Any) -> None:
                counting.count += 1

            return launch

    for kernel in ("split_kernel", "merge_kernel"):
        patch.setattr(triton_kernel, kernel, Stub())
    query, key, value = qkv(step, 2)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)  # as a model's projection leaves it
    with torch.no_grad(), counting:
        for _ in range(2):
            counting.count = 0
            BACKENDS[name].attend(AttentionCall(query, key, value, step, 0.3, window))
    return counting.count


@needs_triton
@pytest.mark.parametrize(
    ("lengths", "nodes", "window"),
    [([30], 16, None), ([30, 9], 16, None), ([30], 16, 8), ([30, 9], 1, None), ([30, 30], 1, None)],
    ids=str,
)
def test_auto_takes_what_launches_least(
    lengths: list[int], nodes: int, window: int | None, gpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    step = step_of(lengths, parents_of(nodes))
    counts = {name: launches(name, step, window, monkeypatch) for name in BACKENDS}
    case = Case("cuda", torch.bfloat16, 64, 64, hides=not step.sees_all(window))
    taken = AttentionChoice("auto").choose(case)
    assert counts[taken] <= 2, counts
    others = [name for name in ("flash", "triton") if name != taken]
    assert all(counts[name] >= counts[taken] for name in others), counts
    if case.hides:
        assert counts["flash"] >= counts["sdpa"] + 10, counts


def test_cases_say_which_device_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GPU of a machine may be another: the one that a tensor is on counts, not the current."""
    generations = {None: (9, 0), 0: (9, 0), 1: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", generations.__getitem__)
    monkeypatch.setattr(triton_backend, "missing", lambda: None)
    with FakeTensorMode():
        query = torch.empty(1, 2, 3, 64, dtype=torch.bfloat16, device="cuda:1")
    case = Case.of(AttentionCall(query, query, query, step_of([9]), 0.3))
    assert AttentionChoice("auto").choose(case) == "sdpa"
    assert AttentionChoice("auto").choose(replace(case, index=0)) == "triton"
    assert AttentionChoice("auto").choose(replace(case, index=0, hides=False)) == "flash"


@needs_triton
def test_kernels_run_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, whatever device its arguments are on."""
    entered: list[str] = []

    @contextmanager
    def device(name: torch.device) -> Iterator[None]:
        entered.append(str(name))
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_backend, "_num_cores", lambda device: 8)
    launched: list[tuple[str, list[str]]] = []
    from medusa_kit.infer.attention import triton_kernel

    class Stub:
        def __getitem__(self, grid: Any) -> Any:
            return lambda query, *rest, **options: launched.append((str(query.device), [*entered]))

    for kernel in ("split_kernel", "merge_kernel"):
        monkeypatch.setattr(triton_kernel, kernel, Stub())
    for index in (0, 1):
        step = step_of([9], parents_of(4))
        with FakeTensorMode(allow_non_fake_inputs=True):
            on = f"cuda:{index}"
            step.depths_BN, step.sees_BNN = step.depths_BN.to(on), step.sees_BNN.to(on)
            query, key, value = (tensor.to(on) for tensor in qkv(step, 2))
            BACKENDS["triton"].attend(AttentionCall(query, key, value, step, 0.3))
    assert launched == [("cuda:0", [])] * 2 + [("cuda:1", ["cuda:1"])] * 2

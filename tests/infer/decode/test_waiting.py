"""What the loop of batch.py makes the host wait for: a read a step, whatever rows and layers.

On a CPU nothing waits, so what would is counted where Python asks for it: a tensor made of numbers
with a device to go to (a copy from ordinary memory), values read; and what `to_device` sends.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import tiny_model

from medusa_kit import transfer
from medusa_kit.base.model import wrap_model
from medusa_kit.drafters.heads import medusa
from medusa_kit.heads import order
from medusa_kit.infer import draft as base
from medusa_kit.infer import tree_cache, tree_step, verifier
from medusa_kit.infer.cpu import kernels

READS = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__")
SENDERS = (tree_cache, tree_step, verifier, base, medusa)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """`wait`: values read, or copied from ordinary memory; `send`: sent without waiting."""
    found: Counter[str] = Counter()
    monkeypatch.setenv(kernels.OFF_SWITCH, "0")

    def counting(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if what != "copy" or "device" in kwargs:
                found["wait" if what == "copy" else what] += 1
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(order, "may_look", lambda _: False)  # as on a device
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting("wait", getattr(torch.Tensor, name)))
    # Only what is given to torch.tensor together with a device is on its way to one.
    monkeypatch.setattr(torch, "tensor", counting("copy", torch.tensor))
    for module in SENDERS:
        monkeypatch.setattr(module, "to_device", counting("send", transfer.to_device))
    return found


def per_step(
    counts: Counter[str], rows: int, family: str = "llama", layers: int = 2, kind: str = "plain",
) -> dict[str, float]:  # fmt: skip
    """What a step counts on average, the prompt left out."""
    model = tiny_model(family, num_hidden_layers=layers)
    model.generation_config.eos_token_id = None
    one = wrap_model(model)
    heads = None if kind == "plain" else random_heads(one, kind=kind)
    engine = build_engine(one, heads=heads, tree=BUSHY if heads else None, attention="sdpa")
    prompts = [random_prompt(5 + row, row) for row in range(rows)]

    def run(tokens: int) -> tuple[Counter[str], int]:
        before = counts.copy()
        results = engine.generate(prompts, max_new_tokens=tokens, batch_size=rows)
        return counts - before, max(result.stats.num_steps for result in results)

    (short, fewer), (long, more) = run(2), run(25)
    assert more > fewer + 5
    return {what: (long[what] - short[what]) / (more - fewer) for what in ("wait", "send")}


@pytest.mark.parametrize("kind", ["plain", "medusa", "hydra"])
def test_a_step_waits_once_and_sends_little(counts: Counter[str], kind: str) -> None:
    """Sent: roots, lengths, where accepted nodes lie (once for their keys and values and once for
    hidden states). Rows that finish are told to the device once each."""
    most = {"plain": 3, "medusa": 4, "hydra": 4}[kind]
    for rows, layers in [(1, 2), (1, 4), (3, 2)]:
        found = per_step(counts, rows, layers=layers, kind=kind)
        assert found["wait"] == pytest.approx(1, abs=0.2), (rows, layers)
        assert found["send"] <= most + 0.5, (rows, layers)


def test_windows_cost_no_more(counts: Counter[str]) -> None:
    found = per_step(counts, 3, family="mistral-sliding", kind="medusa")
    assert found["wait"] == pytest.approx(1, abs=0.2)
    assert found["send"] <= 4.5


def test_heads_on_a_device_do_not_look_at_their_logits() -> None:
    """On the meta device there is nothing to look at."""
    assert order.best_columns(torch.zeros(2, 5, 96, device="meta"), 3).shape == (2, 5, 3)

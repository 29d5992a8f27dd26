"""The self-check of a precision at load: what it finds, what it allows, what it remembers."""

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.kernels.rounded import (
    KINDS,
    PRECISIONS,
    base_of,
    engine_of,
    gguf_file,
    multiplies_integers,
    some,
    weights_for,
)
from support.small_engines import build_engine

import medusa_kit
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.cpu import activations as precisions
from medusa_kit.infer.cpu import decoder
from medusa_kit.infer.cpu.activations import ALLOWED
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.decoder import NativeDecoder

pytestmark = pytest.mark.skipif(not multiplies_integers(), reason="no integers are multiplied here")
Score = Callable[..., tuple[torch.Tensor, ...]]


def build(kind: str, activations: str) -> Engine:
    return build_engine(base_of(kind), **weights_for(kind), activations=activations)


def disturb(monkeypatch: pytest.MonkeyPatch, change: Callable[..., None]) -> None:
    """Let steps with rounded activations go wrong."""
    score: Score = NativeDecoder.score

    def wrong(self: NativeDecoder, cache: Any, nodes: Any, *rest: Any) -> Any:
        hidden, logits, ranked = score(self, cache, nodes, *rest)
        if self.activations != "float32":
            change(nodes, logits)
        return hidden, logits, ranked

    monkeypatch.setattr(NativeDecoder, "score", wrong)


def one_bit_in_company(nodes: Any, logits_NV: torch.Tensor) -> None:
    if len(nodes.tokens_N) > 1:
        logits_NV[-1, 7] = torch.nextafter(logits_NV[-1, 7], torch.tensor(torch.inf))


def one_bit_in_a_second_row(nodes: Any, logits_NV: torch.Tensor) -> None:
    if len(nodes.counts) > 1 and len(logits_NV) == sum(nodes.counts):  # no prompts
        logits_NV[nodes.counts[0], 7] *= 1 + 2.0**-22


def no_number(nodes: Any, logits_NV: torch.Tensor) -> None:
    logits_NV[:, 7] = torch.nan


BROKEN = {"a bit in company": one_bit_in_company, "a bit of a row": one_bit_in_a_second_row,
          "NaN": no_number}  # fmt: skip


@pytest.mark.parametrize("activations", PRECISIONS)
@pytest.mark.parametrize("fault", BROKEN)
def test_what_neighbours_change_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: str, activations: str
) -> None:
    disturb(monkeypatch, BROKEN[fault])
    with pytest.raises(IncompatibleBaseError, match=r"off by \S+ of their spread") as raised:
        build("llama", activations)
    assert f"activations {activations} failed the check at load on 'llama'" in raised.value.message
    assert "use --activations float32" in str(raised.value.hint)
    build("llama", "float32")


def test_too_few_digits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of trees and plain decoding are the same then."""
    monkeypatch.setitem(decoder.DIGITS, "int16", 1)
    for kind in ("llama", "qwen3", "gemma3"):
        with pytest.raises(IncompatibleBaseError, match="from those in float32"):
            build(kind, "int16")


@pytest.mark.parametrize("activations", PRECISIONS)
@pytest.mark.parametrize("fault", ["biases are lost", "another layer's weights"])
def test_wrong_products_are_found(
    monkeypatch: pytest.MonkeyPatch, fault: str, activations: str
) -> None:
    form = NativeDecoder._form

    def wrong(self: NativeDecoder, matrix: Any) -> kernels.Matrix:
        struct, alike = form(self, matrix), self.packed.layers
        if self.activations == "float32":
            return struct
        if fault == "biases are lost":
            struct.bias = None
        elif matrix is alike[-1]["down"]:
            struct.data = alike[0]["down"].struct.data
        return struct

    monkeypatch.setattr(NativeDecoder, "_form", wrong)
    with pytest.raises(IncompatibleBaseError, match="from those in float32"):
        build("llama-with-biases", activations)


@pytest.mark.parametrize(
    ("kind", "activations"), some(list(itertools.product(KINDS, PRECISIONS)), 4)
)
def test_what_rounding_does_is_well_within_what_is_allowed(kind: str, activations: str) -> None:
    """And is far more than float32's own rounding: another precision did run."""
    error = engine_of(kind, activations).check.relative_error
    assert ALLOWED[activations] / 200 < error < 0.6 * ALLOWED[activations]
    assert error > 20 * engine_of(kind, "float32").check.relative_error


def test_what_passed_is_remembered_by_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = str(gguf_file("Q8_0")), ("float32", *PRECISIONS)

    def load(activations: Any, **options: Any) -> Engine:
        return medusa_kit.load(model, heads=None, device="cpu", activations=activations, **options)

    first = {one: load(one, check=True).check for one in asked}
    assert len({check.relative_error for check in first.values()}) == len(asked)
    assert not any(check.remembered for check in first.values())
    compare = precisions._compare
    monkeypatch.setattr(precisions, "_compare", None)  # would fail if it were called
    for one in asked:
        again = load(one).check
        assert again.remembered
        assert again.relative_error == first[one].relative_error
        assert again.rounding_tolerance == first[one].rounding_tolerance
    monkeypatch.setattr(precisions, "_compare", compare)
    disturb(monkeypatch, one_bit_in_company)
    with pytest.raises(IncompatibleBaseError):
        load("int8", check=True)


def test_the_decoders_of_two_precisions_do_not_share_what_they_change() -> None:
    """One is made from the other, and both stay in use."""
    exact = engine_of("llama", "float32").verifier
    rounded = exact.with_activations("int8")
    assert rounded.native is not exact.native
    assert rounded.steps_run_by != exact.steps_run_by
    assert rounded.with_activations("int8").native is rounded.native
    digits = {
        one.native.activations: one.native._struct.output.digits
        for one in (exact, rounded, rounded.with_activations("int16"))
    }
    assert digits == {"float32": 3, "int8": 1, "int16": 2}
    assert ctypes.addressof(exact.native._layers) != ctypes.addressof(rounded.native._layers)

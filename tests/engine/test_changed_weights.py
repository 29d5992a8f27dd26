"""One promise for every runner: an answer is that of the model as it is when the answer begins.

The table is runner x way of changing. The oracle is plain transformers generate on a second model
that was changed in the same way, whose classes and attention are transformers' own.
"""

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from support import cuda_stand_in
from support.models.changes import (
    CHANGES,
    HYBRID,
    PROMPT,
    TOKENS,
    answer,
    change,
    expected,
    layer,
    made,
    parametrize_output,
    plain,
)
from support.small_engines import build_engine
from support.wrapped import Wrapped

import medusa_kit
from medusa_kit.base import model_state
from medusa_kit.base.model import wrap_model
from medusa_kit.base.model_state import ModelWatch
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ModelChangedError
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.decode.threaded.request_queue import RequestQueue
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.runners import backends
from medusa_kit.locks import lock_of
from medusa_kit.settings.sampling import SamplingParams


class Runner(NamedTuple):
    """What `steps_run_by` begins with, and how an engine gets there."""

    family: str
    by: str
    options: Mapping[str, Any] = MappingProxyType({})
    light: bool = False
    without: tuple[str, ...] = ()  # functions of backends.py

    def engine(self, folder: Path, patch: pytest.MonkeyPatch) -> Engine:
        for function in self.without:
            patch.setattr(backends, function, lambda *_: False)
        if self.light:
            made(self.family).save_pretrained(folder)
            engine = medusa_kit.load(str(folder), heads=None, device="cpu")
        else:
            engine = build_engine(wrap_model(made(self.family), None, self.family), **self.options)
        assert engine.steps_run_by.startswith(self.by)
        return engine


RUNNERS = {
    "torch": Runner("llama-tied", "torch", {"attention": "sdpa"}),
    "linear layers in C++": Runner("phi3", "torch, linear layers by C++"),
    "linear layers by MKL": Runner(
        "phi3", "torch, linear layers packed", without=("install_native_linears",)
    ),
    "steps in C++": Runner("llama-tied", "C++"),
    "light base": Runner("llama-tied", "C++", light=True),
    "fixed shapes": Runner("llama-tied", "torch, fixed shapes", {"fixed_shapes": "always"}),
    "chains": Runner(HYBRID, "torch"),
}
IN_CPP = {"linear layers in C++", "steps in C++", "light base"}


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Runner:
    if request.param in IN_CPP and kernels.load_library() is None:
        pytest.skip("the C++ kernels cannot be built on this machine")
    if "MKL" in request.param and not torch.backends.mkl.is_available():
        pytest.skip("torch without MKL")
    return RUNNERS[request.param]


@pytest.fixture
def engine(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    return runner.engine(tmp_path / "model", monkeypatch)


def drafting(runner: Runner) -> str:
    return "prompt-lookup" if runner.family == HYBRID else "recycling"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("way", CHANGES)
def test_changes_are_noticed(runner: Runner, engine: Engine, way: str) -> None:
    """Before the first answer, and between two that share a prompt."""

    def answered() -> list[int]:
        return engine.generate(PROMPT, max_new_tokens=TOKENS, drafter=drafting(runner)).token_ids

    change(engine.base.model, way)
    first = answered()
    assert first == expected(runner.family, (way,)) == answered()
    change(engine.base.model, "by data")
    assert answered() == expected(runner.family, (way, "by data")) != first


def test_a_change_while_an_answer_is_under_way_ends_it(runner: Runner, engine: Engine) -> None:
    request = make_request(engine.verifier, PROMPT, SamplingParams(), 20)
    steps = engine.scheduler.run([request], engine.drafter_for("none"))
    next(steps)
    change(engine.base.model, "by data")
    with pytest.raises(ModelChangedError, match="changed while this answer was under way"):
        list(steps)
    result = engine.generate(PROMPT, max_new_tokens=TOKENS, drafter="none")
    assert result.token_ids == expected(runner.family, ("by data",))
    assert result.stats.cached_tokens == 0


def test_a_weight_that_is_computed_is_not_packed(runner: Runner, engine: Engine) -> None:
    """Each forward may compute it to where the last one did."""
    models = engine.base.model, made(runner.family)
    for model in models:
        parametrize_output(model)
    for factor in (-1.5, 0.5, -3.0):
        for model in models:
            layer(model).self_attn.o_proj.parametrizations.weight[0].factor = factor
        for drafter in ("none", drafting(runner)):
            result = engine.generate(PROMPT, max_new_tokens=TOKENS, drafter=drafter)
            assert result.token_ids == plain(models[1])


def test_in_a_shared_batch(runner: Runner, engine: Engine) -> None:
    """An answer under way ends in an error; those that begin later are of the changed model."""
    once = [None]

    def interfere(tokens: object) -> None:
        for _ in once[:1]:
            once.clear()
            change(engine.base.model, "by data")

    with engine.shared_batch(max_rows=1) as batch:
        assert batch.generate(PROMPT, max_new_tokens=TOKENS).token_ids == expected(runner.family)
        broken = batch.submit(PROMPT, max_new_tokens=20, drafter="none", on_tokens=interfere)
        waiting = batch.submit(PROMPT, max_new_tokens=TOKENS)
        with pytest.raises(ModelChangedError):
            broken.result()
        after = waiting.result()
        assert after.token_ids == expected(runner.family, ("by data",))
        assert after.stats.cached_tokens == 0


@pytest.mark.parametrize("shared", [False, True])
def test_in_a_batch_whose_forwards_hand_over_layers(
    runner: Runner, engine: Engine, shared: bool
) -> None:
    """It takes requests whose drafter reads none, too."""
    reads: Any = Wrapped(engine.drafter_for("none"))
    reads.watches = (0,)
    with contextlib.ExitStack() as stack:
        if shared:
            stack.enter_context(RequestQueue(engine.scheduler, 2, watched=(0,)))
        request = make_request(engine.verifier, PROMPT, SamplingParams(), 4)
        engine.scheduler.decode([request], reads)
        change(engine.base.model, "by data")
        for _ in range(2):
            result = engine.generate(PROMPT, max_new_tokens=TOKENS, drafter="none")
            assert result.token_ids == expected(runner.family, ("by data",))


def test_what_nobody_has_asked_for_is_not_read(
    runner: Runner, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual road pays nothing: only a model that was handed out can be written to."""
    if not runner.light:
        vars(engine.base.own_model)["medusa_kit_watch"] = ModelWatch()
    read = list[object]()
    digest = model_state.contents_digest
    monkeypatch.setattr(
        model_state, "contents_digest", lambda tensors: [read.extend(tensors), digest(tensors)][1]
    )
    for _ in range(2):
        engine.generate(PROMPT, max_new_tokens=4, drafter="none")
    assert not read
    _ = engine.base.model
    engine.generate(PROMPT, max_new_tokens=4, drafter="none")
    assert read


def test_layers_compute_with_what_they_hold_outside_of_answers(engine: Engine) -> None:
    """Whoever calls the model itself gets its weights, whatever was packed of them."""
    answer(engine) if not engine.verifier.chains_only else None
    model, ids = engine.base.model, torch.tensor([PROMPT])
    before = model(ids).logits
    layer(model).mlp.down_proj.weight.data.mul_(-1.5)
    after = model(ids).logits
    assert not torch.allclose(before, after)
    layer(model).mlp.down_proj.weight.data.div_(-1.5)
    torch.testing.assert_close(model(ids).logits, before)


@pytest.mark.parametrize("way", ["by data", "parameter", "module", "norm"])
def test_on_a_device(way: str) -> None:
    """Captured forwards read the memory that weights had, so replaced ones are captured anew."""
    answers = [expected("llama-tied", ways) for ways in ((), (way,))]
    with cuda_stand_in.installed():
        base = wrap_model(made("llama-tied").to("cuda"))
        engine = build_engine(base)
        for ways in ((), (way,)):
            if ways:
                change(base.model, way)
            assert answer(engine) == answers[len(ways)]
            assert isinstance(engine.verifier, CapturedVerifier)


@pytest.mark.parametrize("family", ["llama-tied", "phi3"])
def test_custom_generate(family: str) -> None:
    """It gives the same promise, while a call runs too."""
    model, ids = made(family), torch.tensor([PROMPT])
    given = {"attention_mask": torch.ones_like(ids), "custom_generate": medusa_kit.custom_generate}
    for ways in ((), ("one row",), ("one row", "by numpy")):
        if ways:
            change(model, ways[-1])
        out = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, **given)
        assert out[0, len(PROMPT) :].tolist() == expected(family, ways)

    class Changes:
        def put(self, tokens: torch.Tensor) -> None:
            change(model, "by data")

        def end(self) -> None: ...

    with pytest.raises(ModelChangedError):
        model.generate(ids, max_new_tokens=TOKENS, token_streamer=Changes(), **given)


def test_attention_that_somebody_switched_is_switched_back(engine: Engine, runner: Runner) -> None:
    engine.base.model.set_attn_implementation("eager")
    result = engine.generate(PROMPT, max_new_tokens=TOKENS, drafter=drafting(runner))
    assert result.token_ids == expected(runner.family)


def test_threads_that_answer_while_weights_change_never_mix() -> None:
    """Each answer is of one of the models that there were, or an error that says so."""
    base, turns = wrap_model(made("llama-tied"), None, "tiny"), 4
    engine, seen = build_engine(base), list[list[int]]()
    right = [expected("llama-tied", ("by data",) * turn) for turn in range(turns + 1)]

    def ask() -> None:
        for _ in range(6):
            with contextlib.suppress(ModelChangedError):
                seen.append(answer(engine))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(turns):
        with lock_of(base):  # between two steps
            change(base.model, "by data")
    for thread in threads:
        thread.join()
    assert all(tokens in right for tokens in seen)
    assert answer(engine) == right[-1]


@pytest.mark.parametrize("family", ["llama-tied", "phi3"])
def test_layers_exchanged_and_put_back_within_an_answer(family: str) -> None:
    """Nothing of it is left to see after the answer, nor in what is kept of the prompt."""
    engine = build_engine(wrap_model(made(family), None, family))
    before = answer(engine)
    request = make_request(engine.verifier, PROMPT, SamplingParams(), 20)
    steps = engine.scheduler.run([request], engine.drafter_for("none"))
    next(steps)
    held = engine.base.model.model.layers
    held[0], held[1] = held[1], held[0]
    next(steps)
    held[0], held[1] = held[1], held[0]
    with pytest.raises(ModelChangedError):
        list(steps)
    assert answer(engine) == before

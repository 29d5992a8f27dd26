"""One promise for every runner: an answer is that of the model as it is when the answer begins.

The table is runner x way of changing. The oracle is plain transformers generate on a second model
that was changed in the same way, whose classes and attention are transformers' own.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from support import cuda_stand_in
from support.models.hybrids import tiny_hybrid
from support.small_engines import build_engine, random_heads, random_prompt
from support.tiny_models import tiny_model
from torch import nn
from torch.nn.utils import parametrize, prune

import medusa_kit
from medusa_kit.base import model_state
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import wrap_model
from medusa_kit.base.model_state import ModelWatch
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError, IncompatibleBaseError, ModelChangedError
from medusa_kit.heads import load_heads, save_heads
from medusa_kit.infer.cpu.library import kernels
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.runners import backends
from medusa_kit.locks import lock_of
from medusa_kit.settings.sampling import SamplingParams

needs_cpp = pytest.mark.skipif(kernels.load_library() is None, reason="no compiler")
PROMPT, TOKENS = random_prompt(11, 3), 8


def layer(model: Any) -> Any:
    """The first with attention."""
    return next(one for one in model.model.layers if hasattr(one, "self_attn"))


def write_by_numpy(model: Any) -> None:
    layer(model).mlp.down_proj.weight.detach().numpy()[:] *= -1.5


def write_one_row(model: Any) -> None:
    model.get_input_embeddings().weight.data[PROMPT[4]] *= -3


def load_others(model: Any) -> None:
    twice = {name: -1.5 * one for name, one in model.state_dict().items() if "mlp" in name}
    model.load_state_dict(twice, strict=False)


def replace_weight(model: Any) -> None:
    linear = layer(model).mlp.down_proj
    linear.weight = nn.Parameter(linear.weight.detach() * -1.5, requires_grad=False)


def replace_layer(model: Any) -> None:
    old = layer(model).self_attn.o_proj
    new = nn.Linear(old.in_features, old.out_features, bias=old.bias is not None)
    new.load_state_dict({name: -1.5 * one for name, one in old.state_dict().items()})
    layer(model).self_attn.o_proj = new.requires_grad_(False).to(model.device)


def replace_attention(model: Any) -> None:
    old = layer(model).self_attn
    new = type(old)(old.config, layer_idx=old.layer_idx).eval().requires_grad_(False)
    new.load_state_dict({name: -1.5 * one for name, one in old.state_dict().items()})
    layer(model).self_attn = new.to(model.device)


def merge_adapter(model: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["down_proj", "o_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.5)
    adapted.merge_and_unload()


def set_epsilon(model: Any) -> None:
    norm = layer(model).input_layernorm
    setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 0.9)


class Times(nn.Module):
    """A parametrization: the layer's weight is computed at each forward."""

    factor = -1.5

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.factor


def parametrize_output(model: Any) -> None:
    parametrize.register_parametrization(layer(model).self_attn.o_proj, "weight", Times())


CHANGES: dict[str, Callable[[Any], object]] = {
    "merged by peft": merge_adapter,
    "by data": lambda model: layer(model).mlp.down_proj.weight.data.mul_(-1.5),
    "one row": write_one_row,
    "by numpy": write_by_numpy,
    "set_": lambda m: layer(m).mlp.down_proj.weight.set_(layer(m).mlp.down_proj.weight * -1.5),
    "state_dict": load_others,
    "parameter": replace_weight,
    "module": replace_layer,
    "attention": replace_attention,
    "rope": lambda model: model.model.rotary_emb.inv_freq.mul_(3),
    "norm": lambda model: layer(model).input_layernorm.weight.data.mul_(-2),
    "epsilon": set_epsilon,
    "output": lambda model: model.get_output_embeddings().weight.data.mul_(-1),
    "pruned": lambda model: prune.l1_unstructured(layer(model).self_attn.o_proj, "weight", 0.5),
    "parametrized": parametrize_output,
    "hook": lambda model: layer(model).mlp.register_forward_hook(lambda m, inputs, out: -out),
}


def change(model: Any, way: str) -> None:
    with torch.no_grad():
        CHANGES[way](model)


def plain(model: Any, tokens: int = TOKENS) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return out[0, len(PROMPT) :].tolist()


def made(family: str) -> Any:
    model = tiny_hybrid(family) if family == HYBRID else tiny_model(family)
    model.generation_config.eos_token_id = None
    return model


@cache
def expected(family: str, ways: tuple[str, ...] = (), tokens: int = TOKENS) -> list[int]:
    model = made(family)
    for way in ways:
        change(model, way)
    return plain(model, tokens)


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


HYBRID = "qwen3_5"
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


def answer(engine: Engine, tokens: int = TOKENS) -> list[int]:
    return engine.generate(PROMPT, max_new_tokens=tokens, drafter="lookahead").token_ids


@pytest.fixture
def engine(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    return runner.engine(tmp_path / "model", monkeypatch)


def drafting(runner: Runner) -> str:
    return "prompt-lookup" if runner.family == HYBRID else "lookahead"


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


def test_heads_take_the_dtype_that_the_model_was_given() -> None:
    base, other = wrap_model(made("llama-tied"), None, "tiny"), made("llama-tied")
    engine = build_engine(base, heads=random_heads(base))
    for dtype in (torch.float64, torch.float32):
        for model in (base.model, other):
            model.to(dtype)
        for options in ({}, {"drafter": "auto"}):
            result = engine.generate(PROMPT, max_new_tokens=TOKENS, **options)
            assert result.token_ids == plain(other)
        assert engine.heads is not None
        assert {one.dtype for one in engine.heads.parameters()} == {dtype}
        engine.heads.half()  # and back, where somebody rounds them alone


@needs_cpp
def test_heads_follow_their_base_and_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed heads guess with the rows of the base and with the numbers that are there now."""
    base = wrap_model(made("llama-tied"), None, "tiny")
    ids = torch.arange(0, 96, 2)
    heads = random_heads(base, projection="reduced", reduced_ids=ids)
    engine = build_engine(base, heads=heads)
    hidden = torch.randn(3, base.info.hidden_size, generator=torch.Generator().manual_seed(0))

    def by_torch() -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(heads, "guesser", None)
            return heads.candidates(hidden, 1)

    for edit in (
        lambda: base.model.get_output_embeddings().weight.data.mul_(-1),
        lambda: heads.blocks[0][0].linear.weight.data.mul_(-9),
    ):
        before = heads.candidates(hidden, 1)
        edit()
        assert engine.generate(PROMPT, max_new_tokens=TOKENS).token_ids == plain(base.model)
        assert torch.equal(heads.candidates(hidden, 1), by_torch())
        assert not torch.equal(heads.candidates(hidden, 1), before)


def test_a_draft_model_that_was_changed_drafts_as_it_is() -> None:
    """It is the base's twin until it is changed; drafts of a twin are all right."""
    base, draft = (wrap_model(made("llama-tied"), None, name) for name in ("base", "draft"))
    engine = build_engine(base, draft_model=draft)

    def accepted() -> float:
        result = engine.generate(PROMPT, max_new_tokens=12, drafter="draft-model")
        assert result.token_ids == expected("llama-tied", (), 12)
        return float(result.stats.acceptance_length)

    whole = accepted()
    change(draft.model, "by data")
    change(draft.model, "output")
    assert accepted() < whole
    draft.model.load_state_dict(base.model.state_dict())
    assert accepted() == whole


def test_fingerprint_and_remembered_checks_are_of_what_is_there(tmp_path: Path) -> None:
    made("llama-tied").save_pretrained(tmp_path / "model")
    base = load_base_model(str(tmp_path / "model"), device="cpu")
    assert base.checks_are_remembered
    save_heads(random_heads(base), tmp_path / "heads")
    before = base.info.fingerprint
    change(base.model, "one row")
    engine = build_engine(base)
    assert base.info.fingerprint == base.fingerprint() != before
    assert not base.checks_are_remembered
    assert not engine.check.remembered
    with pytest.raises(IncompatibleBaseError):
        load_heads(tmp_path / "heads", base)


@pytest.mark.parametrize("family", ["gpt2", "llama-tied"])
def test_a_checkpoint_that_is_overwritten_stays_loaded(tmp_path: Path, family: str) -> None:
    """`cp` writes into the file that is there, and transformers maps what need not be converted."""
    made(family).save_pretrained(tmp_path)
    base = load_base_model(str(tmp_path), device="cpu")
    assert base.info.tied_embeddings
    engine = build_engine(base)
    before = engine.generate(PROMPT, max_new_tokens=TOKENS, drafter="none").token_ids
    with (tmp_path / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(bytes(range(1, 101)) * (size // 200))
    assert engine.generate(PROMPT, max_new_tokens=TOKENS, drafter="none").token_ids == before
    assert plain(base.model) == before == plain(made(family))


def test_a_precision_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    library = kernels.load_library()
    if library is None or not kernels.has_integers(library):
        pytest.skip("no kernels that multiply integers")
    made("llama-tied").save_pretrained(tmp_path)
    engine = medusa_kit.load(str(tmp_path), heads=None, weights="int8", activations="int8",
                             device="cpu")  # fmt: skip
    answer(engine)
    change(engine.base.model, "norm")
    with pytest.raises(ConfigError, match="the model was changed"):
        answer(engine)


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

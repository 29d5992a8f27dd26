"""Settings, sizes and parts of a loaded model that somebody changes: an answer is that of
transformers' generate on a model that was changed alike, or both fail, ours with an error of the
kit's. What trees cannot follow is refused."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models.changes import PROMPT, answer, made, plain
from support.small_engines import build_engine, random_heads
from torch import nn

from medusa_kit.base.model import wrap_model
from medusa_kit.errors import IncompatibleBaseError, MedusaKitError
from medusa_kit.infer.cpu.binding.kernels import load_library

BY = ["torch", pytest.param("C++", marks=pytest.mark.skipif(
    load_library() is None, reason="no C++ kernels on this machine"))]  # fmt: skip
CUT = "depend on transformers' KV cache"


def setting(where: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(where), name, value)


def config(**values: Any) -> Callable[[Any], None]:
    return lambda model: vars(model.config).update(values)


def parameter(where: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def way(model: Any) -> None:
        owner, name = where.rsplit(".", 1)
        module = model.get_submodule(owner)
        changed = nn.Parameter(change(getattr(module, name).detach()), requires_grad=False)
        setattr(module, name, changed)

    return way


def no_layers(model: Any) -> None:
    model.model.layers = nn.ModuleList()


def same_layer_twice(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


MLP, ATTENTION = "model.layers.1.mlp", "model.layers.1.self_attn"
SLIDES = ["sliding_attention"] * 3
FAILS = {  # of which transformers' generate fails too
    "a size that is none": setting("model.layers.0.input_layernorm", "variance_epsilon", None),
    "groups of heads": setting(ATTENTION, "num_key_value_groups", 1),
    "another dtype": parameter(f"{MLP}.up_proj.weight", torch.Tensor.double),
    "a norm too short": parameter("model.norm.weight", lambda weight: weight[:16].clone()),
    "columns too few": parameter(f"{MLP}.up_proj.weight", lambda weight: weight[:, :16].clone()),
    "rows too few": parameter(f"{MLP}.up_proj.weight", lambda weight: weight[:24].clone()),
    "fewer tokens": lambda model: model.resize_token_embeddings(30),
    "a whole number that is a float": setting(ATTENTION, "head_dim", 16.0),
    "layers of a kind that its config has no size of": config(
        layer_types=["chunked_attention"] * 3
    ),
    "no output": lambda model: setattr(model, "lm_head", None),
    "no MLP": lambda model: delattr(model.model.layers[1], "mlp"),
    "a layer of another kind": lambda m: m.model.layers.__setitem__(1, nn.Identity()),
}
REFUSED = {  # though transformers' generate runs
    "an output of two modules": lambda m: setattr(m, "lm_head", nn.Sequential(m.lm_head)),
    "no numbers": setting(MLP, "up_proj", nn.Linear(32, 48, bias=False, device="meta")),
    "a cache that slides": config(layer_types=SLIDES, sliding_window=4),
    "a cache in chunks": config(attention_chunk_size=4),
    "the same layer twice": same_layer_twice,
    "layers that share a place in the cache": setting(ATTENTION, "layer_idx", 2),
}
RUNS = {
    "what a layer says of its inputs": setting(f"{MLP}.down_proj", "in_features", 1),
    "groups of heads that attention does not go by": setting(ATTENTION, "num_key_value_groups", 3),
    "what a layer says of its outputs": setting(f"{MLP}.up_proj", "out_features", 0),
    "a norm of another shape": parameter("model.norm.weight", lambda weight: weight[None].clone()),
    "no norm": setting("model", "norm", nn.Identity()),
    "no MLP in a layer": setting("model.layers.1", "mlp", nn.Identity()),
    "no layers": no_layers,
    "more tokens": lambda model: model.resize_token_embeddings(120),
    "another activation in the last layer": setting("model.layers.2.mlp", "act_fn", nn.ReLU()),
}


def engine_of(model: Any, by: str) -> Any:
    return build_engine(wrap_model(model), **({"attention": "sdpa"} if by == "torch" else {}))


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", [*FAILS, *REFUSED, *RUNS])
def test_as_transformers(way: str, by: str) -> None:
    model, twin = made("llama-tied"), made("llama-tied")
    engine = engine_of(model, by)
    assert engine.steps_run_by.startswith(by)
    assert answer(engine) == plain(twin)
    for one in (model, twin):
        torch.manual_seed(0)
        ({**FAILS, **REFUSED, **RUNS})[way](one)
    if way in RUNS:
        assert answer(engine) == plain(twin)
        return
    if way in FAILS:
        with pytest.raises((RuntimeError, TypeError, AttributeError, IndexError)):
            plain(twin)
    with pytest.raises(MedusaKitError):
        answer(engine)


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3", "gemma3", "mistral", "phi3"])
def test_a_cache_that_keeps_less_than_attention_sees(family: str) -> None:
    """transformers' cache goes by the config alone. What a config with windows means to a family's
    attention, each answers for itself."""
    model, twin = made(family), made(family)
    engine, before = build_engine(wrap_model(model)), plain(twin)
    configs = [(one.config, dict(vars(one.config))) for one in (model, twin)]
    for one in (model, twin):
        config(layer_types=SLIDES, sliding_window=4)(one)
    with contextlib.suppress(KeyError):  # Qwen's code, which has set up no masks for windows
        assert plain(twin) != before
    try:
        assert answer(engine) == plain(twin)
    except IncompatibleBaseError as error:
        assert CUT in error.message or family in ("gemma3", "qwen2", "qwen3")  # noqa: PT017
    for changed, values in configs:
        vars(changed).clear()
        vars(changed).update(values)
    assert answer(engine) == plain(twin) == before


@pytest.mark.parametrize("options", [{}, {"attention": "sdpa"}])
def test_a_model_on_the_meta_device(options: dict[str, Any]) -> None:
    """No answer is made, and heads do not follow it there."""
    base = wrap_model(made("llama-tied"))
    heads = random_heads(base)
    engine = build_engine(base, heads=heads, **options)
    base.model.to("meta")
    for ask in (engine.generate, lambda prompt: list(engine.stream(prompt))):
        with pytest.raises(IncompatibleBaseError, match="on the meta device: they have no numbers"):
            ask(PROMPT)
    assert base.device.type == "meta"  # whoever counts without numbers may ask
    assert not any(weight.is_meta for weight in heads.parameters())


def test_such_a_cache_at_load(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import medusa_kit

    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    model = made("llama-tied")
    config(layer_types=SLIDES, sliding_window=4)(model)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(IncompatibleBaseError, match=CUT):
        medusa_kit.load(str(tmp_path / "model"), heads=None, device="cpu")


@pytest.mark.parametrize(
    ("smaller", "again"),
    [
        (config(max_position_embeddings=1), config(max_position_embeddings=128)),
        (lambda m: m.resize_token_embeddings(30), lambda m: m.resize_token_embeddings(96)),
    ],
)
def test_sizes_that_grow_again(smaller: Any, again: Any) -> None:
    """A prompt is held against the sizes that the model has now."""
    model = made("llama-tied")
    engine = build_engine(wrap_model(model))
    smaller(model)
    with pytest.raises(MedusaKitError):
        engine.generate(PROMPT, max_new_tokens=2)
    torch.manual_seed(0)
    again(model)
    assert answer(engine) == plain(model)

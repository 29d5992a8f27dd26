"""Weights packed from files: the bits of the module path, whatever the family and the form."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gguf.tiny_gguf import write_gguf
from support.kernels.packed_weights import BLOCKS, weights_of
from support.tiny_models import MODELS, model_of, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdRef

from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.errors import ConfigError
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.decoder import NativeDecoder, native_decoder
from medusa_kit.infer.cpu.heads import NativeHeads
from medusa_kit.infer.cpu.packed import cache as packed_cache
from medusa_kit.infer.cpu.packed import packing_up
from medusa_kit.infer.cpu.packed.cache import packed_model
from medusa_kit.infer.cpu.packed.file import FileSink
from medusa_kit.infer.cpu.packed.int8_weights import with_weights
from medusa_kit.infer.cpu.packed.model import PackedModel, chosen_rows, expanded_rows
from medusa_kit.infer.cpu.packed.packing import pack
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.model_parts import Unsupported
from medusa_kit.infer.tree_cache import TreeCache
from medusa_kit.infer.verifier import Verifier
from medusa_kit.tree.shape import Numbers

pytestmark = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 32}  # fmt: skip
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in MODELS},
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mlp-of-odd-size": ("llama", {"intermediate_size": 50}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "gemma3-untied": ("gemma3", {"tie_word_embeddings": False}),
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))


def saved(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    family, changes = CHANGES[name]
    model_of(family, **changes).to(dtype).save_pretrained(folder)
    return folder


def loaded(folder: Path) -> BaseModel:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return wrap_model(model, None, str(folder))


def scores(base: BaseModel, decoder: NativeDecoder) -> tuple[torch.Tensor, ...]:
    """Of a tree after a prompt, read by the decoder itself."""
    verifier = Verifier(base)
    cache = verifier.new_cache(1, 64)
    prompt = list(range(3, 23))
    read(decoder, cache, Forest.chains([prompt], torch.device("cpu")), np.arange(20))
    cache.commit([range(20)], [0])
    nodes = Forest.chains([[5, 6, 7]], torch.device("cpu"))
    return read(decoder, cache, nodes, 20 + np.arange(3))


def read(
    decoder: NativeDecoder, cache: TreeCache, nodes: Forest, positions: Numbers
) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        return decoder.score(cache, nodes, positions, [0])


def assert_same(light: PackedModel, base: BaseModel) -> None:
    """Every packed number, the description and a step's results."""
    whole = native_decoder(base)
    for name, value in light.info.items():
        assert value == getattr(base.info, name), name
    assert light.matrices.keys() == whole.packed.matrices.keys()
    for name, matrix in whole.packed.matrices.items():
        assert light.matrices[name].kind == matrix.kind, name
        assert torch.equal(light.matrices[name].data, matrix.data), name
    decoder = NativeDecoder(light, base.scale_logits)
    assert decoder.summary == whole.summary
    for ours, theirs in zip(scores(base, decoder), scores(base, whole), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", CHANGES)
def test_a_folder_gives_the_bits_of_the_modules(name: str, tmp_path: Path) -> None:
    base = loaded(saved(tmp_path, name))
    light = packed_model(tmp_path, base.model.config)
    assert_same(light, base)
    ids = torch.tensor([[0, 7], [95, 3]])
    embedding = base.model.get_input_embeddings()
    assert torch.equal(light.input_rows(ids), embedding.weight[ids])
    assert torch.equal(light.embeddings(ids[1]), embedding(ids[1]))
    output = base.output_embedding
    for chosen in (None, torch.tensor([90, 1, 1, 17])):
        weight, bias = light.output_rows(chosen)
        assert bias is None
        assert torch.equal(weight, output.weight if chosen is None else output.weight[chosen])
    for layer_type, table in zip(
        getattr(base.model.get_decoder().rotary_emb, "layer_types", [None]),
        light.rotary_up_to(100).chunk(len(light._rotary)),
        strict=True,
    ):
        kind = [] if layer_type is None else [layer_type]
        pair = base.model.get_decoder().rotary_emb(torch.empty(1), torch.arange(100)[None], *kind)
        assert torch.equal(table, torch.cat(pair))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_not_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    base = loaded(saved(tmp_path, "llama-tied", dtype))
    light = packed_model(tmp_path, base.model.config)
    assert light.output.kind == "float32"
    assert_same(light, base)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_a_gguf_file_gives_the_bits_of_the_modules(kind: str, tmp_path: Path) -> None:
    """Queries and keys lie in another order there, and their scales with them."""
    pytest.importorskip("gguf")
    base = load_base_model(str(write_gguf(tmp_path / "tiny.gguf", kind=kind)), dtype="float32")
    light = packed_model(tmp_path / "tiny.gguf", base.model.config)
    assert_same(light, base)
    assert (light.output.kind == "float32") == (kind in ("F32", "F16"))
    assert light.input is not light.output


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma3"])
def test_weights_rounded_to_int8(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = loaded(saved(tmp_path, name))
    config = copy.deepcopy(base.model.config)  # rounding in place unties its embeddings
    with_weights(base, "int8")
    said = capsys.readouterr().err
    light = packed_model(tmp_path, config, "int8")
    assert light.output is not light.input
    assert light.info["weights"] == "int8"
    assert_same(light, base)
    lossy = next(line for line in said.splitlines() if "LOSSY" in line)
    assert lossy in capsys.readouterr().err
    packed_model(tmp_path, config, "int8")
    assert lossy in capsys.readouterr().err, "it must be said each time"


def test_weights_that_cannot_be_rounded(tmp_path: Path) -> None:
    model = model_of("llama", hidden_size=48, head_dim=16, num_attention_heads=3,
                     num_key_value_heads=1, intermediate_size=48)  # fmt: skip
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no linear layer has a multiple of 32 inputs"):
        packed_model(tmp_path, model.config, "int8")


def test_what_cannot_run_in_cpp(tmp_path: Path) -> None:
    other = tiny_model("olmo2")
    with pytest.raises(Unsupported, match="no description of 'olmo2'"):
        packed_model(tmp_path, other.config)
    saved(tmp_path, "llama")
    config = loaded(tmp_path).model.config
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(Unsupported, match="changes with the length"):
        packed_model(tmp_path, config)
    config.rope_parameters, config.num_hidden_layers = YARN, 9
    with pytest.raises(Unsupported, match="lacks 54 tensors"):
        packed_model(tmp_path, config)


def test_tied_tensors_that_differ_are_not_taken_for_one(tmp_path: Path) -> None:
    """transformers does not tie what is stored twice with different numbers."""
    saved(tmp_path, "llama")
    config = loaded(tmp_path).model.config
    config.tie_word_embeddings = True
    with pytest.raises(Unsupported, match="are tied but differ"):
        packed_model(tmp_path, config)


@pytest.mark.parametrize("kind", ["Q4_1", "F32"])
def test_matrices_in_pieces(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    base = load_base_model(str(write_gguf(tmp_path / "tiny.gguf", kind=kind)), dtype="float32")
    monkeypatch.setattr(packing_up, "PIECE", 64 * 32)  # 64 rows
    light = packed_model(tmp_path / "tiny.gguf", base.model.config)
    monkeypatch.undo()
    assert_same(light, base)


def test_one_piece_of_another_form_widens_all(tmp_path: Path, monkeypatch: Any) -> None:
    model = model_of("llama", vocab_size=160)
    model = model.to(torch.bfloat16).float()
    model.lm_head.weight.data[130, 5] += 2**-20
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(packing_up, "PIECE", 64 * 96)
    light = packed_model(tmp_path, model.config)
    assert light.output.kind == "float32"
    assert light.input.kind == "bfloat16"
    assert torch.equal(light.output_rows()[0], model.lm_head.weight)


class Alive(TorchDispatchMode):
    """The most bytes of tensors alive at once, counted as operations make them. What safetensors
    maps from a file (`set_`) takes no memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._alive = 0, dict[Any, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type == "cpu":
            storage = out.untyped_storage()
            mapped = func is torch.ops.aten.set_.source_Storage
            self._alive.setdefault(WeakIdRef(storage), 0 if mapped else storage.nbytes())
            self._alive = {ref: size for ref, size in self._alive.items() if ref() is not None}
            self.most = max(self.most, sum(self._alive.values()))
        return out


def test_memory_is_bounded_by_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", vocab_size=8000).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(packing_up, "PIECE", 320 * 96)
    skeleton = packed_cache.skeleton_of(packed_cache._in_float32(model.config))
    monkeypatch.setattr(packed_cache, "skeleton_of", lambda config: skeleton)
    with (tmp_path / "packed").open("wb") as file, Alive() as alive:
        packed_cache._packed(tmp_path, model.config, "checkpoint", FileSink(file))
    assert alive.most < model.lm_head.weight.nbytes, "one table of two, in half of float32"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", *BLOCKS])
def test_rows_of_every_form(kind: str) -> None:
    weight, blocks = weights_of(kind), BLOCKS.get(kind)
    bias = torch.arange(37.0)
    matrix = pack(weight, bias, blocks)
    ids = torch.tensor([36, 0, 17, 17, 5])
    assert torch.equal(expanded_rows(matrix, ids), weight[ids])
    assert torch.equal(expanded_rows(matrix, None), weight)
    assert torch.equal(expanded_rows(matrix, ids, 3.7), weight[ids] * 3.7)
    for wrong in (37, -1):
        with pytest.raises(IndexError, match=f"row {wrong} of a matrix that has 37"):
            expanded_rows(matrix, torch.tensor([3, wrong]))
    many = torch.arange(37).repeat(3)
    chosen = chosen_rows(matrix, many)
    assert chosen.kind == matrix.kind
    assert torch.equal(chosen.bias if chosen.bias is not None else bias, bias[many])
    assert torch.equal(expanded_rows(chosen, None), weight[many])
    expected = pack(weight[many], None, blocks and blocks.select(many))
    assert torch.equal(chosen.data, expected.data)


def test_heads_guess_from_packed_weights(tmp_path: Path) -> None:
    base = loaded(saved(tmp_path, "llama-tied"))
    decoder = NativeDecoder(packed_model(tmp_path, base.model.config), base.scale_logits)
    heads = MedusaHeads.for_base(base, 2, 1, "reduced", torch.arange(1, 96, 2), "hydra")
    for parameter in heads.requires_grad_(False).parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    hidden, path = torch.randn(3, base.info.hidden_size), torch.randint(0, 96, (3, 2))
    expected = heads.candidates_after(1, hidden, path, 4)
    guesses = NativeHeads(heads, decoder)([1], hidden, path, 4)
    assert guesses is not None
    assert torch.equal(guesses[0][0], expected)

"""A model that is read layer by layer gives the logits of the whole model."""

import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any

import pytest
import torch
from support.gguf.tiny_gguf import write_gguf
from support.tiny_models import tiny_model
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from medusa_kit.base import layerwise
from medusa_kit.base.layerwise import LayerwiseModel, layerwise_model
from medusa_kit.base.loading import load_base_model
from medusa_kit.errors import IncompatibleBaseError

FAMILIES = ["llama", "mistral", "mistral-sliding", "qwen2", "qwen3", "gemma", "gemma3",
            "gemma3-capped", "granite-scaled", "phi"]  # fmt: skip
TEXTS = [[5, 6, 7], [40, 41, 9, 9, 3, 80, 81, 2, 17], [11, 90, 33, 8, 1, 5]]


def saved(folder: Path, family: str, **changes: Any) -> tuple[Any, LayerwiseModel]:
    model = tiny_model(family, **changes)
    model.save_pretrained(folder)
    return model, layerwise_model(str(folder))


def plain_logits(model: Any, text: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([text]), use_cache=False).logits[0]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise, "PIECE", 32 * 7)  # 7 rows of the output embedding
    monkeypatch.setattr(layerwise, "MAX_TOKENS", 12)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_whole_model(
    tmp_path: Path, family: str, tied: bool, small_pieces: None
) -> None:
    model, pieces = saved(tmp_path, family, tie_word_embeddings=tied)
    starts = [0, 6, 5]
    found = dict(pieces.logits(TEXTS, starts))
    for index, (text, start) in enumerate(zip(TEXTS, starts, strict=True)):
        expected_TV = plain_logits(model, text)
        torch.testing.assert_close(found[index], expected_TV[start:], atol=1e-4, rtol=1e-4)
    last_BV = torch.stack([plain_logits(model, text)[-1] for text in TEXTS])
    torch.testing.assert_close(pieces.last_logits(TEXTS), last_BV, atol=1e-4, rtol=1e-4)


def test_a_text_with_which_another_begins_is_read_within_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, and equal ones once: the paths of a tree share most of their tokens."""
    model, pieces = saved(tmp_path, "llama")
    long = TEXTS[1]
    texts = [long[:4], long, [*long[:5], 7], long[:4], long[:6], TEXTS[0]]
    expected_BV = torch.stack([plain_logits(model, text)[-1] for text in texts])
    read = list[list[int]]()
    forward = pieces.model.forward
    monkeypatch.setattr(
        pieces.model,
        "forward",
        lambda ids_BT, **more: read.extend(ids_BT) or forward(ids_BT, **more),
    )
    torch.testing.assert_close(pieces.last_logits(texts), expected_BV, atol=1e-4, rtol=1e-4)
    assert len(read) == 3


def test_a_checkpoint_in_16_bits_is_computed_in_32(tmp_path: Path) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    found = layerwise_model(str(tmp_path)).last_logits(TEXTS)
    whole = load_base_model(str(tmp_path), dtype="float32", device="cpu")
    expected_BV = torch.stack([plain_logits(whole.model, text)[-1] for text in TEXTS])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected_BV, atol=1e-4, rtol=1e-4)


def test_a_gguf_file_is_read_without_dequantising_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "model.gguf")
    pieces = layerwise_model(str(path))
    found = pieces.last_logits(TEXTS)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    base = load_base_model(str(path), device="cpu")
    expected_BV = torch.stack([plain_logits(base.model, text)[-1] for text in TEXTS])
    torch.testing.assert_close(found, expected_BV, atol=1e-4, rtol=1e-4)
    settings = pieces.model.generation_config
    assert settings.eos_token_id == base.model.generation_config.eos_token_id


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "phi3", "qwen3moe"])
def test_blocks_of_a_file_are_read_in_pieces(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rows lie in another order than the model's, as Llama's queries and keys."""
    pytest.importorskip("gguf")
    from support.gguf.quantised_files import quantised

    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(layerwise, "PIECE", 7 * 256)
    path = quantised(tmp_path / "model.gguf", architecture)
    found = layerwise_model(str(path)).last_logits(TEXTS)
    model = load_base_model(str(path), device="cpu").model
    expected_BV = torch.stack([plain_logits(model, text)[-1] for text in TEXTS])
    spread = float(expected_BV.std())
    torch.testing.assert_close(found / spread, expected_BV / spread, atol=1e-4, rtol=1e-4)


def test_pieces_are_computed_by_as_many_threads_as_have_a_turn(
    tmp_path: Path, small_pieces: None
) -> None:
    _, pieces = saved(tmp_path, "llama")
    pieces.num_threads, pieces.turns = 3, Semaphore(3)
    expected_BV = pieces.last_logits(TEXTS)
    at_once, most, lock = 0, list[int](), Lock()

    def changed(linear: Any, weight_OI: Tensor) -> Tensor:
        nonlocal at_once
        with lock:
            at_once += 1
            most.append(at_once)
        time.sleep(0.0001)
        with lock:
            at_once -= 1
        return weight_OI

    pieces._change = changed
    for held in (1, 2):
        pieces.turns.acquire()
        most.clear()
        assert torch.equal(pieces.last_logits(TEXTS), expected_BV)
        assert max(most) <= 3 - held


def test_an_error_in_a_thread_is_the_forwards(tmp_path: Path, small_pieces: None) -> None:
    _, pieces = saved(tmp_path, "llama")

    def fail(linear: Any, weight_OI: Tensor) -> Tensor:
        raise ArithmeticError("odd")

    pieces._change = fail
    with pytest.raises(ArithmeticError, match="odd"):
        pieces.last_logits(TEXTS)


@pytest.mark.parametrize("mixes", [False, True])
def test_equal_beginnings_are_multiplied_once_unless_a_model_tells_texts_apart(
    mixes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pieces = saved(tmp_path, "llama")
    texts = [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 4]]
    counts, product = list[int](), pieces._product

    def counted(linear: Any, inputs_NI: Tensor) -> Tensor:
        counts.append(len(inputs_NI))
        return product(linear, inputs_NI)

    def mix(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * (1 + torch.arange(len(args[0]))[:, None, None]), *args[1:])

    monkeypatch.setattr(pieces, "_product", counted)
    if mixes:
        for one in (model, pieces.model):
            one.model.layers[0].mlp.register_forward_pre_hook(mix)
    found_BV = pieces.last_logits(texts)
    ids_BT = torch.tensor([texts[0], texts[1], [*texts[2], 0]])
    with torch.no_grad():
        whole_BTV = model(ids_BT, use_cache=False).logits
    expected_BV = torch.stack([whole_BTV[row, len(text) - 1] for row, text in enumerate(texts)])
    torch.testing.assert_close(found_BV, expected_BV, atol=1e-4, rtol=1e-4)
    assert set(counts[:-1]) == ({6, 12} if mixes else {6})


def test_few_weights_are_there_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    """A layer's vectors, a piece of a matrix and the rows of the tokens read."""
    alive: list[tuple[StorageWeakRef, int]] = []
    sizes: list[int] = []

    def watching(read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watch(*arguments: Any) -> Tensor:
            tensor = read(*arguments)
            alive.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
            sizes.append(sum(size for storage, size in alive if not storage.expired()))
            return tensor

        return watch

    model, pieces = saved(tmp_path, "llama", num_hidden_layers=6, tie_word_embeddings=False)
    stored = pieces._stored
    whole = {name: stored.read(name) for name in stored.names}  # read_rows is watched beneath it
    monkeypatch.setattr(stored, "read", watching(lambda name: whole[name].clone()))
    monkeypatch.setattr(stored, "read_rows", watching(stored.read_rows))
    pieces.last_logits(TEXTS)
    whole_layer = list(model.model.layers[0].parameters())
    layer = sum(one.nbytes for one in whole_layer)
    vectors = sum(one.nbytes for one in whole_layer if one.dim() == 1)
    embedded = 4 * 32 * len({token for text in TEXTS for token in text})
    assert vectors <= max(sizes) <= vectors + embedded + 3 * 4 * layerwise.PIECE < layer
    assert sum(size for _, size in alive) > 2 * 6 * layer, "two batches"
    inside = [one for layer in pieces.model.model.layers for one in layer.parameters()]
    assert {one.device.type for one in inside} == {"meta"}


def test_a_layer_that_fails_is_empty_again(tmp_path: Path) -> None:
    model, pieces = saved(tmp_path, "llama")

    def fail(*_: Any) -> None:
        raise RuntimeError("no more")

    handle = pieces.model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no more"):
        pieces.last_logits(TEXTS)
    handle.remove()
    assert pieces.model.model.layers[1].mlp.up_proj.weight.is_meta
    expected_V = plain_logits(model, TEXTS[0])[-1]
    torch.testing.assert_close(pieces.last_logits(TEXTS[:1])[0], expected_V, atol=1e-4, rtol=1e-4)


def test_weights_may_be_changed_as_they_are_read(tmp_path: Path) -> None:
    """Of linear layers only, with an output embedding that is tied among them."""
    model, _ = saved(tmp_path, "llama-tied")
    pieces = layerwise_model(str(tmp_path), change=lambda _, weight: weight * 2)
    embedding = model.model.embed_tokens.weight.detach().clone()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(module.weight * 2)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    expected_V = plain_logits(model, TEXTS[0])[-1]
    torch.testing.assert_close(pieces.last_logits(TEXTS[:1])[0], expected_V, atol=1e-4, rtol=1e-4)


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(IncompatibleBaseError, match="'llama' cannot be run layer by layer"):
        LayerwiseModel(model.config, tmp_path)


def test_a_model_without_a_checkpoint_is_refused() -> None:
    with pytest.raises(IncompatibleBaseError, match="'debug-tiny' cannot be run layer by layer"):
        layerwise_model("debug-tiny")

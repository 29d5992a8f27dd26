"""Tensors read one at a time are those that transformers loads."""

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model
from torch import nn

from medusa_kit.base import stored_tensors as stored
from medusa_kit.base.stored_tensors import SafetensorsFolder, skeleton_of, stored_tensors
from medusa_kit.errors import CheckpointError


def tiny(tied: bool = True) -> Any:
    return tiny_model("llama", num_hidden_layers=2, tie_word_embeddings=tied)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["5GB", "10KB"])
def test_a_folder_is_read_tensor_by_tensor(tmp_path: Path, tied: bool, shard_size: str) -> None:
    model = tiny(tied).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    stored = stored_tensors(tmp_path, skeleton_of(model.config))
    state = model.state_dict()
    assert stored.names == set(state) - ({"lm_head.weight"} if tied else set())
    for name in stored.names:
        assert torch.equal(stored.read(name), state[name]), name


def test_a_skeleton_has_no_weights_but_its_buffers() -> None:
    skeleton = skeleton_of(tiny().config)
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    whole = tiny()
    for (name, one), (_, other) in zip(
        skeleton.named_buffers(), whole.named_buffers(), strict=True
    ):
        assert torch.equal(one, other), name


def test_what_another_thread_builds_meanwhile_is_real(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    build = stored.causal_model

    def beside_another(config: Any) -> Any:
        other = Thread(target=lambda: found.append(nn.Linear(1, 1)))
        other.start()
        other.join()
        return build(config)

    monkeypatch.setattr(stored, "causal_model", beside_another)
    assert {parameter.device.type for parameter in skeleton_of(tiny().config).parameters()} == {
        "meta"
    }
    assert [layer.weight.device.type for layer in found] == ["cpu"]


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    larger = tiny().config
    larger.num_hidden_layers = 3
    with pytest.raises(CheckpointError, match=r"lacks 9 tensors .* 'model\.layers\.2"):
        SafetensorsFolder(tmp_path, skeleton_of(larger))


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        stored_tensors(tmp_path, skeleton_of(tiny().config))


def test_tensors_of_another_shape_are_refused(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    larger = tiny().config
    larger.vocab_size = 99
    with pytest.raises(CheckpointError, match=r"\[96, 32\], expected \[99, 32\]"):
        SafetensorsFolder(tmp_path, skeleton_of(larger))


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="is no index of safetensors files"):
        stored_tensors(tmp_path, skeleton_of(tiny().config))


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_file_that_is_cut_is_refused(tmp_path: Path, kept: int) -> None:
    tiny().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        stored_tensors(tmp_path, skeleton_of(tiny().config))

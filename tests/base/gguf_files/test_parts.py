"""A model in several GGUF files: any part's name finds all, and a missing one is named."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from support.gguf.tiny_files import tiny_model, write_model

from medusa_kit.base.files import stored_quantised
from medusa_kit.base.gguf import dequantised_folder, described_folder
from medusa_kit.base.gguf_files.architectures import IN_CPP
from medusa_kit.base.gguf_files.check import checked
from medusa_kit.base.gguf_files.config import read_config
from medusa_kit.base.gguf_files.header import read_header
from medusa_kit.base.gguf_files.parts import LISTS, as_one_file
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.stored_tensors import GGUFTensors, skeleton_of
from medusa_kit.errors import CheckpointError

pytest.importorskip("gguf")


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The first has no output embedding, by which transformers sees whether it is tied."""
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    found = write_model(tmp_path / "model.gguf", "llama", tiny_model("llama"), part_size=8)
    assert [path.name for path in found] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return found


def test_any_part_gives_the_whole_model(parts: list[Path]) -> None:
    model = tiny_model("llama")
    state = model.state_dict()
    for part in parts:
        stored = GGUFTensors(part, skeleton_of(model.config))
        assert stored.names == set(state)
        assert all(torch.equal(stored.read(name), state[name]) for name in state)
    assert len({dequantised_folder(part) for part in parts}) == 1
    base = load_base_model(str(parts[1]), device="cpu")
    loaded = base.model.state_dict()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert not base.info.tied_embeddings
    assert base.tokenizer.decode(base.tokenizer.encode("Hello")) == "Hello"
    assert stored_quantised(str(parts[2])) is None


def test_a_described_model_takes_no_room(parts: list[Path]) -> None:
    folder = described_folder(parts[0])
    assert {path.suffix for path in folder.iterdir()} == {".json"}
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".joined")]


def test_what_killed_processes_left_goes(parts: list[Path], tmp_path: Path) -> None:
    old, fresh = tmp_path / "cache/.joined-old", tmp_path / "cache/.joined-fresh"
    for one in (old, fresh):
        one.mkdir(parents=True)
        (one / "model.gguf").write_bytes(b"GGUF")
    two_days_ago = time.time() - 2 * 86_400
    os.utime(old, (two_days_ago, two_days_ago))
    with as_one_file(checked(parts[0]), tmp_path / "cache"):
        assert not old.exists()
        assert fresh.exists()  # somebody may read it


@pytest.mark.parametrize("architecture", IN_CPP)
def test_a_config_needs_no_lists_of_the_vocabulary(architecture: str, tmp_path: Path) -> None:
    """transformers takes seconds to read them."""
    path = tmp_path / "model.gguf"
    write_model(path, architecture, tiny_model(architecture))
    model = checked(path)
    with as_one_file(model, tmp_path / "cache", weights=False) as one_file:
        short = read_config(one_file, model)
        assert not any(key in LISTS for key in read_header(one_file).values)
    whole = read_config(path, model)
    where = {"_name_or_path": None}  # which is not kept
    assert short.to_dict() | where == whole.to_dict() | where


def test_a_changed_part_is_another_model(parts: list[Path]) -> None:
    before = dequantised_folder(parts[0])
    raw = parts[2].read_bytes()
    parts[2].write_bytes(raw[:-4] + bytes(4))
    assert dequantised_folder(parts[0]) != before


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    for given in (parts[0], parts[2]):
        with pytest.raises(CheckpointError, match=r"and model-00002-of-00003\.gguf is not next to"):
            checked(given)


def test_parts_that_do_not_belong_together(parts: list[Path], tmp_path: Path) -> None:
    alone = tmp_path / "renamed.gguf"
    shutil.copy(parts[0], alone)
    with pytest.raises(CheckpointError, match=r"renamed\.gguf is one of 3 parts; expected a name"):
        checked(alone)
    whole = parts[1].read_bytes()
    shutil.copy(parts[2], parts[1])
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf says that it is part 2 of 3;"):
        checked(parts[0])
    parts[1].write_bytes(whole.replace(b"ffn_up.weight", b"ffn_uq.weight", 1))
    with pytest.raises(CheckpointError, match=r"ffn_uq\.weight', which no part of the model"):
        dequantised_folder(parts[0])
    parts[1].write_bytes(whole[:-40])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf is cut off: its tensor"):
        checked(parts[2])

"""The base model's two views against the model's own forward, and the loader's refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.tiny_models import EVERY, PROMISED, tiny_base, tiny_model

from medusa_kit.base import files, loading
from medusa_kit.base.loading import load_base_model, load_tokenizer
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError

CLOSE = {"atol": 1e-5, "rtol": 1e-4}  # float32 sums in another order


@pytest.mark.parametrize("family", EVERY)
def test_head_logits_of_the_hidden_state_are_the_models_logits(family: str) -> None:
    base = tiny_base(family)
    ids_BT = torch.randint(3, 96, (2, 13))
    expected = tiny_model(family)(ids_BT).logits
    torch.testing.assert_close(base.head_logits(base.hidden_states(ids_BT)), expected, **CLOSE)


def test_every_promised_family_is_covered() -> None:
    assert set(PROMISED) <= set(EVERY)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_padding_on_the_right_changes_nothing(family: str) -> None:
    base = tiny_base(family)
    ids_BT = torch.randint(3, 96, (1, 9))
    padded = torch.cat([ids_BT, torch.zeros(1, 4, dtype=torch.int64)], dim=1)
    mask = (torch.arange(13) < 9).long()[None]
    torch.testing.assert_close(
        base.hidden_states(padded, mask)[:, :9], base.hidden_states(ids_BT), **CLOSE
    )


def test_info_and_fingerprint(llama: BaseModel) -> None:
    info = llama.info
    assert (info.model_type, info.hidden_size, info.vocab_size) == ("llama", 32, 96)
    assert (info.num_layers, info.context_length, info.tied_embeddings) == (3, 128, False)
    assert tiny_base("llama").info.fingerprint == info.fingerprint
    assert tiny_base("llama", seed=1).info.fingerprint != info.fingerprint
    assert tiny_base("llama-tied").info.tied_embeddings
    half = tiny_base("llama", dtype=torch.bfloat16)
    assert half.info.fingerprint == info.fingerprint, "the load dtype must not matter"


def test_digest_sees_any_weight(llama: BaseModel) -> None:
    before = llama.weights_digest()
    assert tiny_base("llama").weights_digest() == before
    llama.model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1e-3
    assert llama.weights_digest() != before


def test_unknown_logit_change_is_refused() -> None:
    """A family that alters its logits in a way we do not rebuild must not load."""
    model = tiny_model("granite-scaled")
    original = model.forward

    def altered(*args: object, **kwargs: object) -> object:
        output = original(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = altered
    with pytest.raises(IncompatibleBaseError, match="differ from the model's own by"):
        wrap_model(model)


def test_folder_round_trip(tmp_path: Path, chat_base: BaseModel) -> None:
    chat_base.model.save_pretrained(tmp_path)
    chat_base.tokenizer.save_pretrained(tmp_path)
    loaded = load_base_model(str(tmp_path), device="cpu")
    assert loaded.info.source == "folder"
    assert loaded.info.fingerprint == chat_base.info.fingerprint
    assert loaded.stop_token_ids == chat_base.stop_token_ids


def test_missing_and_cut_off_folders(tmp_path: Path, chat_base: BaseModel) -> None:
    with pytest.raises(CheckpointError, match="no model at"):
        load_base_model(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_base_model(str(tmp_path))
    chat_base.model.save_pretrained(tmp_path)
    chat_base.tokenizer.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="cannot load a base model"):
        load_base_model(str(tmp_path))


@pytest.mark.parametrize("name", ["mistyped", "models/mistyped", "models/", "a\\b"])
@pytest.mark.parametrize("load", [load_base_model, load_tokenizer])
def test_a_folder_that_is_not_there_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, name: str, load: Callable[[str], object]
) -> None:
    """Also where it could be a Hub id; the Hub's client speaks of its connection alone."""

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.")

    for module in (files, loading):
        for reader in ("read_config", "read_tokenizer"):
            monkeypatch.setattr(module, reader, unreachable, raising=False)
    with pytest.raises(CheckpointError, match=r"no folder|no model at") as caught:
        load(name)
    assert "couldn't connect" not in str(caught.value)
    assert name.rstrip("/") in caught.value.message.replace("\\\\", "\\")
    assert "path" in caught.value.hint


def test_missing_and_cut_off_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match="no GGUF file"):
        load_base_model(str(tmp_path / "a.gguf"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match=r"a\.gguf has version 0; expected 2 or 3"):
        load_base_model(str(tmp_path / "a.gguf"))
    assert not list((tmp_path / "cache").glob("**/*.safetensors"))


def test_unknown_dtype_and_device() -> None:
    with pytest.raises(ConfigError, match="did you mean float32") as caught:
        load_base_model("debug-tiny", dtype="flaot32")
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match="unknown"):
        load_base_model("debug-tiny", device="gpu")


def test_hub_ids_reach_the_hub_loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline, a Hub id that is not cached says so, and what keeps it from being asked for."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="someone/nothing") as caught:
        load_base_model("someone/nothing")
    assert "unset HF_HUB_OFFLINE" in (caught.value.hint or "")
    assert json.dumps(caught.value.message)

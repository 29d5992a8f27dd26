"""What drafters read from files: read when an engine is loaded, once for all heads; damage is told
then, whatever asked for it."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.native.dflash_folders import dflash_folder
from support.native.eagle_folders import eagle_folder
from support.native.mtp_folders import mtp_folder
from support.small_engines import build_engine, random_heads
from support.tiny_models import tiny_base, tiny_model

import medusa_kit
from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.drafters.draft_model import loading
from medusa_kit.drafters.native import dflash, eagle, mtp_layers
from medusa_kit.drafters.text import suffix
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_store import HeadsStore
from medusa_kit.errors import CheckpointError, ConfigError, MedusaKitError
from medusa_kit.heads import save_heads

SOON = 60.0  # seconds after which a test has failed
WEIGHTS, VOCAB = "model.safetensors", 24


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model for debug-tiny."""
    folder, tokenizer = tmp_path_factory.mktemp("whole"), byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), tie_word_embeddings=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def change(path: Path, part: str, number: float | None) -> None:
    """Put a number into the first tensor of this name; None: leave it out."""
    tensors = load_file(path)
    name = next(name for name in tensors if part in name)
    if number is None:
        del tensors[name]
    else:
        tensors[name].view(-1)[3] = number
    save_file(tensors, path, metadata={"format": "pt"})


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut off": lambda folder: os.truncate(folder / WEIGHTS, 2000),
    "empty": lambda folder: os.truncate(folder / WEIGHTS, 0),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "no folder": shutil.rmtree,
    "no JSON": lambda folder: (folder / "config.json").write_text("{"),
    "a tensor is missing": lambda folder: change(folder / WEIGHTS, "q_proj", None),
    "NaN": lambda folder: change(folder / WEIGHTS, "q_proj", torch.nan),
    "NaN in one row": lambda folder: change(folder / WEIGHTS, "embed_tokens", torch.nan),
    "infinite": lambda folder: change(folder / WEIGHTS, "down_proj", torch.inf),
    "no tokenizer": no_tokenizer,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_draft_model_is_refused_at_load(damage: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(whole, folder)
    DAMAGES[damage](folder)
    with pytest.raises((CheckpointError, ConfigError), match="draft") as failed:
        medusa_kit.load("debug-tiny", heads=None, draft_model=str(folder))
    assert failed.value.hint
    assert str(folder) in failed.value.message


@pytest.mark.parametrize("drafter", [None, "suffix", "draft-model"])
def test_no_request_reads_the_draft_model(
    drafter: str | None, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Any = {"drafter": drafter} if drafter else {}
    engine = medusa_kit.load("debug-tiny", heads=None, draft_model=str(whole), **given)
    monkeypatch.setattr(loading, "base_for_decoding", None)  # which would fail
    for name in ("auto", "draft-model"):
        engine.generate([5, 6], max_new_tokens=3, drafter=name)
    with engine.shared_batch() as batch:
        batch.generate([5, 6], max_new_tokens=3, drafter="draft-model")


def test_a_damaged_store_is_refused_at_load(tmp_path: Path) -> None:
    path = tmp_path / "past.npz"
    path.write_bytes(b"PK\x03\x04 not whole")
    store = {"store": str(path)}
    for given in (
        {"drafter": "suffix", "drafter_options": store},
        {"drafter": "auto", "drafter_options": {"options": {"suffix": store}}},
    ):
        with pytest.raises(CheckpointError, match="past answers"):
            medusa_kit.load("debug-tiny", heads=None, **given)


def test_a_store_that_is_damaged_later_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "past.npz"
    given: Any = {"drafter": "suffix", "drafter_options": {"store": str(path)}}
    engine = build_engine(tiny_base("llama"))
    expected = engine.generate([5, 6], max_new_tokens=9, **given)
    assert path.is_file()
    path.write_bytes(b"no store")
    for _ in range(2):
        found = engine.generate([5, 6], max_new_tokens=9, **given)
        assert found.token_ids == expected.token_ids
        assert found.stats.num_steps < expected.stats.num_steps  # what was read is known
    assert capsys.readouterr().err.count("is still used") == 1
    assert path.read_bytes() == b"no store"
    path.unlink()
    engine.generate([5, 6], max_new_tokens=9, **given)
    with np.load(path) as stored:
        assert "lengths" in stored


def mtp_base(folder: Path) -> BaseModel:
    return load_base_model(str(mtp_folder(folder)), device="cpu")


def of_four_layers() -> BaseModel:
    return wrap_model(tiny_model("llama", num_hidden_layers=4, vocab_size=VOCAB))


def past_engine(path: Path) -> Engine:
    given: Any = {
        "drafter": "auto",
        "drafter_options": {"options": {"suffix": {"store": str(path)}}},
    }
    return build_engine(tiny_base("llama"), **given)


# What is made once, by the function that reads it, and an engine that needs it.
KINDS: dict[str, tuple[Any, str, Callable[[Path], Engine]]] = {
    "MTP": (mtp_layers, "load_layers", lambda folder: build_engine(mtp_base(folder))),
    "DFlash": (dflash, "load_dflash", lambda folder: build_engine(
        of_four_layers(), draft_model=str(dflash_folder(folder)))),
    "EAGLE-3": (eagle, "load_eagle", lambda folder: build_engine(
        of_four_layers(), draft_model=str(eagle_folder(folder, VOCAB, VOCAB)))),
    "past answers": (suffix, "PastAnswers", lambda folder: past_engine(folder / "past.npz")),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_all_heads_share_what_they_are_not_in(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, engine_of = KINDS[kind]
    engine = engine_of(tmp_path / "draft")
    read, calls = getattr(module, name), list[Any]()
    monkeypatch.setattr(module, name, lambda *args: calls.append(args) or read(*args))
    for number in range(3):
        save_heads(random_heads(engine.base, 2), tmp_path / "heads" / f"h{number}")
    expected = engine.generate([5, 6], max_new_tokens=6, drafter="none").token_ids
    with HeadsStore(engine, tmp_path / "heads") as store, engine.shared_batch() as batch:
        for number in range(3):
            with store.get(f"h{number}") as lease:
                found = batch.generate([5, 6], max_new_tokens=6, drafter="auto", heads=lease)
            assert found.token_ids == expected
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["MTP", "DFlash", "EAGLE-3"])
def test_files_of_native_drafts_may_be_written_over(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries map what they need not convert."""
    module, name, engine_of = KINDS[kind]
    read, made = getattr(module, name), list[Any]()
    monkeypatch.setattr(module, name, lambda *args: made.append(read(*args)) or made[-1])
    engine = engine_of(tmp_path / "draft")
    drafter = "mtp" if kind == "MTP" else "draft-model"
    engine.generate([5, 6], max_new_tokens=4, drafter=drafter)
    before = {key: one.clone() for key, one in made[0].state_dict().items()}
    for path in (tmp_path / "draft").glob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    for key, one in made[0].state_dict().items():
        assert torch.equal(one, before[key]), key


def test_requests_with_other_drafters_go_on_while_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build_engine(tiny_base("llama"))
    going, go_on = threading.Event(), threading.Event()
    make = Engine.drafter_for

    def slow(self: Engine, name: str | None, *args: Any) -> Any:
        if name == "suffix":
            going.set()
            assert go_on.wait(SOON)
        return make(self, name, *args)

    monkeypatch.setattr(Engine, "drafter_for", slow)
    with engine.shared_batch() as batch:
        waiting = threading.Thread(
            target=batch.generate, args=([5, 6],), kwargs={"max_new_tokens": 3, "drafter": "suffix"}
        )
        waiting.start()
        assert going.wait(SOON)
        done = threading.Event()

        def other() -> None:
            batch.generate([5, 6], max_new_tokens=3, drafter="none")
            done.set()

        threading.Thread(target=other, daemon=True).start()
        ended = done.wait(20)
        go_on.set()
        waiting.join(SOON)
    assert ended


@pytest.mark.parametrize("kind", ["MTP", "DFlash", "EAGLE-3"])
def test_native_drafts_that_are_no_numbers_are_refused_at_load(kind: str, tmp_path: Path) -> None:
    base, draft = tmp_path / "base", tmp_path / "draft"
    if kind == "MTP":
        mtp_folder(base)
        damaged, part = base, "eh_proj"
    else:
        of_four_layers().model.save_pretrained(base)
        damaged = dflash_folder(draft) if kind == "DFlash" else eagle_folder(draft, VOCAB, VOCAB)
        part = "norm.weight"
    change(next(damaged.glob("*.safetensors")), part, torch.nan)
    given: Any = {} if kind == "MTP" else {"draft_model": str(draft)}
    with pytest.raises(MedusaKitError, match="NaN"):
        medusa_kit.load(str(base), heads=None, device="cpu", **given)

"""A multimodal checkpoint is used as a text model is: its text part trains, decodes and serves."""

from pathlib import Path

import pytest
import torch
from support.debug_model import ROOT
from support.multimodal.whole_models import chat_folder
from support.serving.live_server import live_server
from transformers import AutoModelForMultimodalLM

import medusa_kit
from medusa_kit.base.loading import load_base_model
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.verify import verify
from medusa_kit.infer.cpu.packed_base import base_for_decoding
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.train.forecast.described import DescribedBase
from medusa_kit.train.trainer import train

KINDS = ["gemma3", "qwen2_5_vl"]  # a class of transformers' own for the text part, and none
QUESTION = "What is the sky?"
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/sky.png"}}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, shared_cache: Path) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(shared_cache))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("chat")
    return {kind: chat_folder(root / kind, kind) for kind in KINDS}


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["gemma3"]


def trained(folder: Path, output: Path, *changes: str) -> Path:
    recipe = load_recipe(ROOT / "recipes/debug.yaml", [
        f"base.model={folder}", f"output_dir={output}", "deepspeed.enabled=false",
        "base.device=cpu", "train.epochs=1", *changes,
    ])  # fmt: skip
    train(recipe)
    return output


def test_heads_train_and_draft(folder: Path, tmp_path: Path) -> None:
    heads = trained(folder, tmp_path / "run") / "heads"
    engine = medusa_kit.load(str(folder), heads=str(heads))
    report = verify(engine, Oracle(load_base_model(str(folder))), [QUESTION], max_new_tokens=8)
    assert not report.failed, report
    whole = AutoModelForMultimodalLM.from_pretrained(folder)
    ids_BT = torch.tensor([[5, 9, 200, 31, 7]])
    plain_BT = whole.generate(ids_BT, max_new_tokens=12, do_sample=False)
    result = engine.generate(ids_BT[0].tolist(), max_new_tokens=12, drafter="medusa")
    assert result.token_ids == plain_BT[0, ids_BT.shape[1] :].tolist()


def test_a_base_trained_with_its_heads(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["qwen2_5_vl"]
    output = trained(folder, tmp_path / "run", "stage=medusa2")
    engine = medusa_kit.load(str(output / "adapter"))
    assert engine.heads is not None
    assert engine.base.info.fingerprint != load_base_model(str(folder)).info.fingerprint
    assert engine.generate(QUESTION, max_new_tokens=4).token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_its_sizes_are_known_from_its_config(kind: str, folders: dict[str, Path]) -> None:
    folder = folders[kind]
    section = load_recipe(ROOT / "recipes/debug.yaml", [f"base.model={folder}"]).base
    described, loaded = DescribedBase(section).info, load_base_model(str(folder)).info
    for name in ("model_type", "hidden_size", "vocab_size", "num_layers", "context_length",
                 "num_parameters"):  # fmt: skip
        assert getattr(described, name) == getattr(loaded, name)


@pytest.mark.parametrize("kind", KINDS)
def test_ends_of_answers_come_from_the_nested_config(kind: str, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / kind, kind)
    stops = load_base_model(str(folder)).stop_token_ids
    (folder / "generation_config.json").unlink()
    assert load_base_model(str(folder)).stop_token_ids == stops
    assert base_for_decoding(str(folder)).stop_token_ids == stops


def test_text_is_served_and_an_image_is_refused(folder: Path) -> None:
    text = {"type": "text", "text": QUESTION}
    with live_server(medusa_kit.load(str(folder), heads=None)) as live, live.http() as http:
        asked = {"model": http.get("/v1/models").json()["data"][0]["id"], "max_tokens": 4}

        def answer(content: object) -> tuple[int, dict[str, object]]:
            body = {**asked, "messages": [{"role": "user", "content": content}]}
            response = http.post("/v1/chat/completions", json=body)
            return response.status_code, response.json()

        (status, plain), (_, parts) = answer(QUESTION), answer([text])
        assert status == 200
        assert parts["choices"] == plain["choices"]
        status, refused = answer([text, IMAGE])
    assert status == 400
    assert refused["error"]["param"] == "messages.0.content.1.type"  # type: ignore[index]
    assert "decodes text only" in refused["error"]["message"]  # type: ignore[index]

"""A small file of a model that cannot be used is named, whichever library noticed."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.text.other_encodings import with_pairs
from support.tiny_models import model_of

from medusa_kit.base.adapters import read_info
from medusa_kit.base.files import check_readable
from medusa_kit.base.loading import load_base_model, load_tokenizer
from medusa_kit.errors import CheckpointError

HUGE = 10**30
MANY_DIGITS = '{"zzz": ' + 5000 * "9" + ", "
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = with_pairs(single_digits=False)
    model = model_of("llama", vocab_size=len(tokenizer), pad_token_id=None, bos_token_id=None)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def change(path: Path, changes: dict[str, Any]) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        *((CONFIG, {key: HUGE}, f"says {key}: a number of 31 digits")
          for key in ("hidden_size", "num_hidden_layers", "vocab_size", "eos_token_id")),
        (CONFIG, {"num_hidden_layers": 10**12}, "num_hidden_layers: a number of 13 digits"),
        (CONFIG, {"num_experts": 10**9}, "num_experts: a number of 10 digits"),
        (CONFIG, {"max_position_embeddings": 10**400}, "a number of 401 digits"),
        (CONFIG, {"num_attention_heads": "four"}, "'four', expected a number"),
        (CONFIG, {"rms_norm_eps": "x"}, "'x', expected a number"),
        (CONFIG, {"num_attention_heads": -1}, "num_attention_heads: -1, expected a number from 0"),
        (CONFIG, {"hidden_size": [1]}, "'hidden_size'"),
        (CONFIG, {"rope_parameters": "x"}, "'rope_parameters'"),
        (CONFIG, {"model_type": 5}, "model type `5`"),
        (GENERATION, {"eos_token_id": HUGE}, "says eos_token_id: a number of 31 digits"),
        (GENERATION, {"eos_token_id": {"a": 1}}, "expected token ids"),
        (TOKENIZER, {"model": HUGE}, "says model: '10{30}', expected an object"),
    ],
)  # fmt: skip
def test_numbers_and_types_that_cannot_be(
    folder: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    change(folder / name, changes)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}.*{said}") as caught:
        load_base_model(str(folder), device="cpu")
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("count", [10**12, HUGE])
def test_layers_that_transformers_would_list_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Where a family's config has a list of its layers, reading it would not come to an end."""
    monkeypatch.setattr(
        "transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("it is read")
    )
    change(folder / CONFIG, {"num_hidden_layers": count, "model_type": "qwen2"})
    for read in (load_base_model, check_readable):
        with pytest.raises(CheckpointError, match=r"config\.json says num_hidden_layers: a number"):
            read(str(folder))


@pytest.mark.parametrize("name", [CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG])
@pytest.mark.parametrize("text", [MANY_DIGITS, "[]", "{"])
def test_text_that_is_no_object(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text + path.read_text()[1:] if text == MANY_DIGITS else text)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_base_model(str(folder), device="cpu")


ODD = [
    (TOKENIZER_CONFIG, {"eos_token": [1]}, "eos_token: '.1.', expected text, or an object"),
    (TOKENIZER_CONFIG, {"tokenizer_class": 5}, "tokenizer_class: '5', expected text"),
    (TOKENIZER_CONFIG, {"model_max_length": "x"}, "model_max_length: 'x', expected a number"),
    (TOKENIZER_CONFIG, {"padding_side": None}, "padding_side: None, expected 'left' or"),
    (TOKENIZER_CONFIG, {"add_bos_token": "false"}, "add_bos_token: 'false', expected true or"),
    (TOKENIZER_CONFIG, {"extra_special_tokens": 5}, "extra_special_tokens: '5', expected a list"),
    (TOKENIZER_CONFIG, {"added_tokens_decoder": {"1": 2}}, "expected an object of objects"),
    (TOKENIZER_CONFIG, {"chat_template": 5}, "chat_template: '5', expected text, or a list"),
    (TOKENIZER_CONFIG, {"chat_template": [{"name": 1}]}, "expected text, or a list of objects"),
    (TOKENIZER, {"normalizer": ["x"]}, "normalizer: .*, expected an object"),  # is read
    (TOKENIZER, {"added_tokens": [{"id": 1, "content": 5}]}, "added_tokens.0.content: '5', expect"),
    (TOKENIZER, {"added_tokens": {}}, "added_tokens: .*, expected a list"),
    (TOKENIZER, {"truncation": {"a": 1}}, "cannot be read: missing field `max_length`"),
    (TOKENIZER, {"model": {}}, "cannot be read: "),
    ("special_tokens_map.json", {"bos_token": 5}, "bos_token: '5', expected text, or an object"),
    ("added_tokens.json", {"<new>": "x"}, "<new>: 'x', expected a token id"),
    (GENERATION, {"max_new_tokens": "x"}, "max_new_tokens: 'x', expected a number"),
    (GENERATION, {"suppress_tokens": [[1]]}, "suppress_tokens: .*, expected a list of token ids"),
    (GENERATION, {"temperature": "hot"}, "temperature: 'hot', expected a number"),
    (GENERATION, {"watermarking_config": 5}, "watermarking_config: '5', expected an object"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "said"), ODD)
def test_odd_types_in_files_of_tokenizers_and_generation(
    folder: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    change(folder / name, changes)
    readers = (load_base_model, *((load_tokenizer,) if name != GENERATION else ()))
    for read in readers:
        with pytest.raises(CheckpointError, match=rf"{re.escape(name)} .*{said}") as caught:
            read(str(folder))
        assert caught.value.hint


def test_a_template_that_is_no_text(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read: .*utf-8"):
        load_base_model(str(folder), device="cpu")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.json").write_text('{"chat_template": [1]}')  # a processor's
    with pytest.raises(CheckpointError, match=r"chat_template\.json says chat_template"):
        load_base_model(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"base_model": 5}, "base_model is 5, expected text"),
        ({"revision": [1]}, r"revision is \[1\], expected text"),
        ({"base_fingerprint": None}, "base_fingerprint is None, expected text"),
        ([], r"it is \[\], expected an object"),
        ({}, None),
    ],
)
def test_an_adapters_base_of_odd_types(tmp_path: Path, told: Any, said: str | None) -> None:
    own = {"base_model": "debug-tiny", "revision": None, "base_fingerprint": "1"}
    path = tmp_path / "medusa_kit.json"
    path.write_text(json.dumps({**own, **told} if isinstance(told, dict) else told))
    if said is None:
        assert read_info(tmp_path) == own
        return
    with pytest.raises(CheckpointError, match=said) as caught:
        read_info(tmp_path)
    assert caught.value.hint


def test_words_of_a_vocabulary_that_are_called_like_settings(folder: Path) -> None:
    path = folder / TOKENIZER
    content = json.loads(path.read_text())
    content["model"]["vocab"]["layers"] = 150_000  # in a large vocabulary
    path.write_text(json.dumps(content))
    assert load_base_model(str(folder), device="cpu").tokenizer is not None


@pytest.fixture
def on_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a model whose files are those of `folder`, brought from the Hub before."""
    import huggingface_hub

    cache = tmp_path / "hub"
    repository = cache / "models--someone--model"
    commit = 40 * "a"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / commit).symlink_to(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    return "someone/model"


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (CONFIG, {"num_hidden_layers": 10**12}, "num_hidden_layers: a number of 13 digits"),
        (CONFIG, {"num_experts": 10**9}, "num_experts: a number of 10 digits"),
        (GENERATION, {"eos_token_id": {"a": 1}}, "eos_token_id: .*, expected token ids"),
        (TOKENIZER_CONFIG, {"eos_token": [1]}, "eos_token: .*, expected text"),
        (TOKENIZER, {"normalizer": ["x"]}, "normalizer: .*, expected an object"),
    ],
)  # fmt: skip
def test_a_model_of_the_hub_is_looked_at_too(
    on_the_hub: str, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, changes: Any,
    said: str,
) -> None:  # fmt: skip
    assert load_base_model(on_the_hub, device="cpu").tokenizer is not None
    change(folder / name, changes)
    if name == CONFIG:
        monkeypatch.setattr(
            "transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("it is read")
        )
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} .*{said}") as caught:
        load_base_model(on_the_hub, device="cpu")
    assert caught.value.hint


def test_a_tokenizer_without_an_end_is_no_fault(folder: Path) -> None:
    change(folder / TOKENIZER_CONFIG, {"model_max_length": HUGE})
    assert load_base_model(str(folder), device="cpu").tokenizer is not None

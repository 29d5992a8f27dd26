"""A small file of a model that cannot be used is named, whichever library noticed."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.text.other_encodings import with_pairs
from support.tiny_models import model_of

from medusa_kit.base.files import check_readable
from medusa_kit.base.loading import load_base_model
from medusa_kit.errors import CheckpointError

HUGE = 10**30
MANY_DIGITS = '{"zzz": ' + 5000 * "9" + ", "
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"


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
        (CONFIG, {"hidden_size": [1]}, "'hidden_size'"),
        (CONFIG, {"rope_parameters": "x"}, "'rope_parameters'"),
        (CONFIG, {"model_type": 5}, "model type `5`"),
        (GENERATION, {"eos_token_id": HUGE}, "says eos_token_id: a number of 31 digits"),
        (GENERATION, {"eos_token_id": {"a": 1}}, "expected token ids"),
        (TOKENIZER, {"model": HUGE}, "says model: a number of 31 digits"),
    ],
)  # fmt: skip
def test_numbers_and_types_that_cannot_be(
    folder: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
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
    told = {**json.loads((folder / CONFIG).read_text()), "num_hidden_layers": count}
    (folder / CONFIG).write_text(json.dumps({**told, "model_type": "qwen2"}))
    for read in (load_base_model, check_readable):
        with pytest.raises(CheckpointError, match=r"config\.json says num_hidden_layers: a number"):
            read(str(folder))


@pytest.mark.parametrize("name", [CONFIG, GENERATION, TOKENIZER, "tokenizer_config.json"])
@pytest.mark.parametrize("text", [MANY_DIGITS, "[]", "{"])
def test_text_that_is_no_object(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text + path.read_text()[1:] if text == MANY_DIGITS else text)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_base_model(str(folder), device="cpu")


@pytest.mark.parametrize("changes", [{"eos_token": [1]}, {"tokenizer_class": 5}])
def test_odd_types_in_a_tokenizer(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match="reading its tokenizer files"):
        load_base_model(str(folder), device="cpu")


def test_a_tokenizer_without_an_end_is_no_fault(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": HUGE}))
    assert load_base_model(str(folder), device="cpu").tokenizer is not None

"""What is remembered of a folder's config and tokenizer is what transformers reads."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import tiny_model
from tokenizers import AddedToken
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.base.remembered_configs import own_config, read_config, read_tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    tiny_model("llama").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_config_is_the_same_when_it_is_remembered(folder: Path) -> None:
    first, second = (read_config(str(folder)) for _ in range(2))
    assert type(first) is type(AutoConfig.from_pretrained(folder))
    assert type(second).__base__ is PreTrainedConfig
    assert second.model_type == "llama"
    assert second.get_text_config() is second
    wanted = {**vars(first), "model_type": "llama", "transformers_version": None}
    got = {**vars(second), "transformers_version": None, "use_cache": True}
    assert got == wanted
    again = own_config(second)
    assert type(again) is type(first)
    assert again.to_dict() == first.to_dict()


def test_a_tokenizer_is_the_same_when_it_is_remembered(folder: Path) -> None:
    first, second = (read_tokenizer(str(folder)) for _ in range(2))
    assert type(first) is type(second) is type(AutoTokenizer.from_pretrained(folder))
    assert first.get_vocab() == second.get_vocab()
    chat = [{"role": "user", "content": "Grüße <|im_end|>"}]
    both = [one.apply_chat_template(chat, add_generation_prompt=True) for one in (first, second)]
    assert both[0] == both[1]
    assert first.special_tokens_map == second.special_tokens_map


def recorded(folder: Path) -> Any:
    (memory,) = (folder.parent / "cache" / "described").glob("*-tokenizer-parts.json")
    return json.loads(memory.read_text())["known"]


def test_remembered_added_tokens_make_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<one>", lstrip=True), AddedToken("<two>", special=True)])
    tokenizer.save_pretrained(folder)
    first, second = (read_tokenizer(str(folder)) for _ in range(2))
    assert {"<one>", "<two>"} <= {one["content"] for one in recorded(folder)["added"].values()}
    assert repr(first.added_tokens_decoder) == repr(second.added_tokens_decoder)
    for number, one in enumerate((first, second)):
        one.save_pretrained(tmp_path / str(number))
    for path in (tmp_path / "0").iterdir():
        assert path.read_bytes() == (tmp_path / "1" / path.name).read_bytes()
    text = "a <one>b <two> c"
    assert first(text).input_ids == second(text).input_ids


def test_added_tokens_in_other_files_are_not_remembered(folder: Path) -> None:
    (folder / "added_tokens.json").write_text('{"<three>": 300}')
    first, second = (read_tokenizer(str(folder)) for _ in range(2))
    assert recorded(folder)["added"] is None
    assert "<three>" in first.get_vocab()
    assert first.get_vocab() == second.get_vocab()


def test_a_damaged_memory_of_a_tokenizer_is_passed_over(folder: Path) -> None:
    read_tokenizer(str(folder))
    (memory,) = (folder.parent / "cache" / "described").iterdir()
    memory.write_text(json.dumps({**json.loads(memory.read_text()), "known": {}}))
    assert len(read_tokenizer(str(folder))) == len(byte_tokenizer())


def test_a_changed_folder_is_read_again(folder: Path) -> None:
    read_config(str(folder)), read_tokenizer(str(folder))
    path = folder / "config.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "num_hidden_layers": 7}))
    assert read_config(str(folder)).num_hidden_layers == 7
    assert read_config(str(folder)).num_hidden_layers == 7
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    chat = [{"role": "user", "content": "Hi"}]
    said = read_tokenizer(str(folder)).apply_chat_template(chat, tokenize=False)
    assert said == "Hi!"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"known": 1}'])
def test_a_damaged_memory_is_passed_over(folder: Path, damage: str) -> None:
    read_config(str(folder))
    (memory,) = (folder.parent / "cache" / "described").iterdir()
    memory.write_text(damage)
    assert read_config(str(folder)).num_hidden_layers > 0
    assert json.loads(memory.read_text())["known"]["model_type"] == "llama"


def test_environments_that_share_a_cache_folder_keep_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []
    for version in ("8", "9", "8", "9"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        kinds.append(type(read_config(str(folder))).__name__)
    assert kinds == ["LlamaConfig", "LlamaConfig", "RememberedConfig", "RememberedConfig"]


@pytest.mark.slow
def test_neither_needs_the_code_of_models_the_second_time(folder: Path) -> None:
    read_config(str(folder)), read_tokenizer(str(folder))
    code = (
        "import sys; from medusa_kit.base.remembered_configs import *;"
        f"read_config({str(folder)!r}); read_tokenizer({str(folder)!r});"
        "print([m for m in sys.modules if m in ('torch._dynamo', 'transformers.modeling_utils',"
        "'transformers.activations')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr

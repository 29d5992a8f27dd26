"""llama.cpp's answers to how texts are encoded: tests/base/gguf_files/llama_cpp.json.

    python benchmarks/llama_tokenizers.py [--files a.gguf b.gguf]

A tiny model is written for every splitting rule that llama.cpp knows (the names are read from its
source) and for SentencePiece's flags, and llama-server is asked for the ids of each text. The
vocabulary has merges across all places where a rule might split. Of the embedded model it is asked
the same, and the ids of `verify`'s own prompts: medusa_kit/assets/encodings.json, which `verify`
holds the kit's against. `--files`: real models, whose ids are compared with the kit's instead;
differences are printed.
"""

import argparse
import json
import re
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_tools

sys.path.insert(0, "tests")
from support.gguf.texts import TEXTS
from support.gguf.tiny_vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, write_vocabulary
from transformers.convert_slow_tokenizer import bytes_to_unicode

from medusa_kit import console
from medusa_kit.base.gguf import EMBEDDED_NAME, embedded_gguf, gguf_digest
from medusa_kit.base.gguf_files.pre_tokenizers import RULES
from medusa_kit.base.loading import load_tokenizer

TARGET = Path("tests/base/gguf_files/llama_cpp.json")
ASSETS = Path("medusa_kit/assets")
KEPT, PROMPTS = ASSETS / "encodings.json", ASSETS / "verify_prompts.jsonl"
SOURCE = f"llama_cpp_python-{llama_tools.LLAMA_CPP_PYTHON}/vendor/llama.cpp/src/llama-vocab.cpp"
MAX_MERGES = 3000
WHOLE = ("Hello", " world", "123", "1234", "\n\n", "中文", " HTTP")  # tokens that no merges make
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPECIAL_TEXT = ("<unk>", "<s>", "</s>", *SPECIAL)
LETTERS = bytes_to_unicode()
MISSING = "default"  # what a file without a name gets; llama.cpp compares it in another way


def in_letters(text: str) -> list[str]:
    return [LETTERS[byte] for byte in text.encode()]


def in_text(text: str) -> list[str]:
    return list(text.replace(" ", "▁"))


def trained(texts: Sequence[list[str]]) -> list[tuple[str, str]]:
    """Merges of the most frequent pairs, wherever they are, until every text is one token."""
    merges: list[tuple[str, str]] = []
    words = [list(text) for text in texts]
    while len(merges) < MAX_MERGES:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        if not pairs:
            break
        pair = pairs.most_common(1)[0][0]
        merges.append(pair)
        words = [list(_joined(word, pair)) for word in words]
    return merges


def _joined(word: list[str], pair: tuple[str, str]) -> Iterator[str]:
    place = 0
    while place < len(word):
        if tuple(word[place : place + 2]) == pair:
            yield pair[0] + pair[1]
            place += 2
        else:
            yield word[place]
            place += 1


def vocabulary(
    split: Any, letters: Sequence[str], special: Sequence[str], texts: Sequence[str] = TEXTS
) -> dict[str, Any]:
    """Tokens, kinds and merges over `letters`, which those of `texts` are among."""
    # A token in llama.cpp ends at a zero byte.
    merges = trained([split(part) for text in texts for part in text.split("\0")])
    made = [*letters, *(left + right for left, right in merges)]
    whole = ["".join(split(text)) for text in WHOLE]
    tokens = list(dict.fromkeys([*special, *made, *whole]))
    kinds = [
        CONTROL if token in special else BYTE if re.fullmatch("<0x..>", token) else NORMAL
        for token in tokens
    ]
    return {"tokens": tokens, "kinds": kinds, "merges": [f"{a} {b}" for a, b in merges]}


def vocabularies() -> dict[str, dict[str, Any]]:
    """By how tokens are written: `bytes`, `text`, and `pieces` with scores."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    # The letters of the last texts are no tokens, and so are written in bytes.
    known = TEXTS[:-4]
    letters = sorted({letter for text in known for letter in in_text(text)} - {"\0"})
    found = {
        "bytes": vocabulary(in_letters, list(LETTERS.values()), SPECIAL),
        "text": vocabulary(in_text, [*bytes_, *letters], SPECIAL, known),
    }
    pieces = vocabulary(in_text, [*bytes_, *letters], SPECIAL_TEXT, known)
    pieces["kinds"][0] = UNKNOWN
    number = len(pieces["tokens"])
    pieces["scores"] = [float(-place) for place in range(number)]
    del pieces["merges"]
    return found | {"pieces": pieces}


def names() -> list[str]:
    source = (llama_tools.FOLDER / SOURCE).read_text(encoding="utf-8")
    return sorted({MISSING, *re.findall(r'tokenizer_pre == "([^"]+)"', source)})


def cases() -> dict[str, dict[str, Any]]:
    """By name: the vocabulary, and the rest of what `write_vocabulary` takes."""
    rules = {
        f"pre {name}": {"vocabulary": "text" if not RULES[name].in_bytes else "bytes", "pre": name}
        for name in names()
    }
    pieces: dict[str, Any] = {"vocabulary": "pieces", "model": "llama"}
    return rules | {
        "SentencePiece": pieces,
        "SentencePiece, no space before": {**pieces, "flags": {"add_space_prefix": False}},
        "SentencePiece, extra spaces": {**pieces, "flags": {"remove_extra_whitespaces": True}},
        "SentencePiece, with EOS": {**pieces, "flags": {"add_eos_token": True}},
        "SentencePiece, no BOS": {**pieces, "flags": {"add_bos_token": False}},
        "Phi-3": {**pieces, "name": "Phi-3"},
    }


def written(case: dict[str, Any], found: dict[str, Any], path: Path) -> Path:
    of = found[case["vocabulary"]]
    given = {key: value for key, value in case.items() if key != "vocabulary"}
    ids = {"bos": 1, "eos": 2} if case["vocabulary"] == "pieces" else {"bos": 0, "eos": 0}
    return write_vocabulary(
        path, of["tokens"], of["kinds"], merges=of.get("merges", ()),
        scores=of.get("scores", ()), ids=ids, **given,
    )  # fmt: skip


def asked(url: str, text: str, around: bool = True) -> list[int]:
    """`around`: with BOS and what else belongs around a text."""
    body = json.dumps({"content": text, "add_special": around, "parse_special": True}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url.removesuffix('/v1')}/tokenize", body, headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return list(json.load(reply)["tokens"])


def of_file(path: Path) -> list[list[int] | None]:
    """None for a text that ends llama-server."""
    found: list[list[int] | None] = []
    while len(found) < len(TEXTS):
        with llama_tools.serve(path, 1, "--ctx-size", "64", "--no-warmup") as url:
            try:
                for text in TEXTS[len(found) :]:
                    found.append(asked(url, text))
            except ConnectionError:
                found.append(None)
    return found


def make() -> None:
    found, answers, wanted = vocabularies(), dict[str, list[list[int] | None]](), cases()
    with (
        tempfile.TemporaryDirectory() as folder,
        console.progress("asking", len(wanted), "case") as bar,
    ):
        for name, case in wanted.items():
            answers[name] = of_file(written(case, found, Path(folder) / "tiny.gguf"))
            bar.advance()
    kept: list[list[list[int] | None]] = []
    places = {}
    for name, ids in answers.items():
        if ids not in kept:
            kept.append(ids)
        places[name] = kept.index(ids)
    embedded = embedded_gguf()
    record = {"llama_cpp_python": llama_tools.LLAMA_CPP_PYTHON, "vocabularies": found,
              "cases": {name: {**case, "answers": places[name]} for name, case in wanted.items()},
              "answers": kept, "embedded": of_file(embedded)}  # fmt: skip
    TARGET.write_text(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
    console.note(f"{TARGET}: {len(answers)} cases, {len(kept)} different")


def keep() -> None:
    """The ids of rendered prompts, by the file's SHA-256."""
    from medusa_kit.data.template import render_text

    file = embedded_gguf()
    tokenizer = load_tokenizer(EMBEDDED_NAME)
    prompts = [json.loads(line)["messages"] for line in PROMPTS.read_text().splitlines()]
    texts = [*TEXTS, *(render_text(tokenizer, prompt) for prompt in prompts)]
    with llama_tools.serve(file, 1, "--no-warmup") as url:
        found = {text: asked(url, text, around=False) for text in texts}
    record = {gguf_digest(file): found}
    KEPT.write_text(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")


def compare(files: Sequence[Path]) -> None:
    from medusa_kit.base.gguf_files.tokenizer import read_tokenizer

    for file in files:
        tokenizer, different = read_tokenizer(file), 0
        for text, theirs in zip(TEXTS, of_file(file), strict=True):
            if (ours := tokenizer(text).input_ids) != theirs:
                different += 1
                print(f"{file.name} {text!r}:\n  here      {ours}\n  llama.cpp {theirs}")
        print(f"{file.name}: {len(TEXTS) - different} of {len(TEXTS)} texts are encoded alike")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=Path, nargs="+")
    given = parser.parse_args()
    llama_tools.build()
    if given.files:
        compare(given.files)
    else:
        make()
        keep()


if __name__ == "__main__":
    main()

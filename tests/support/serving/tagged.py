"""Tokenizers that have tags such as `<tool_call>` as tokens, special or not."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from medusa_kit.base.gguf import CHATML_TEMPLATE
from support.debug_model import SPACE, SPECIAL, small_tokenizer


def tagged_tokenizer(
    special: Sequence[str] = (),
    plain: Sequence[str] = (),
    template: str = CHATML_TEMPLATE,
    kind: str = "bytes",
) -> Any:
    """`special`: added tokens that the answer's text lacks; `plain`: others. `kind`: bytes, or
    pieces, which fall back to bytes as SentencePiece's do."""
    known = small_tokenizer(template) if kind == "bytes" else _pieces(template)
    known.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in special])
    known.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in plain])
    return known


def _pieces(template: str) -> Any:
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*SPECIAL, *fallback, SPACE, *map(chr, range(33, 127)), "ab", "<t", "ool"]
    merges = [("a", "b"), ("<", "t"), ("o", "o"), ("oo", "l")]
    vocabulary = {piece: place for place, piece in enumerate([*pieces, "oo"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    known = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>",
        additional_special_tokens=SPECIAL[2:], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    known.chat_template = template
    return known

"""A byte-level tokenizer with the special tokens and merges that a test names, and a template."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_kit.data.chat import EncodedExample


def marked_tokenizer(
    template: str,
    specials: Sequence[str] = (),
    eos: str = "<E>",
    merges: Sequence[tuple[str, str]] = (),
    bos: str | None = None,
) -> Any:
    """`merges`: pairs of GPT-2's letters for bytes (`Ċ` a line break, `Ġ` a space)."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for first, second in merges:
        vocabulary[first + second] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=eos, bos_token=bos, clean_up_tokenization_spaces=False
    )
    added = [AddedToken(one, special=True, normalized=False) for one in specials]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    tokenizer.chat_template = template
    return tokenizer


def trained_runs(tokenizer: Any, example: EncodedExample) -> list[str]:
    """The runs of tokens that are trained on, as text."""
    runs, before = list[str](), False
    for token, is_trained in zip(example.input_ids, example.loss_mask, strict=True):
        if is_trained and before:
            runs[-1] += tokenizer.decode([token])
        elif is_trained:
            runs.append(tokenizer.decode([token]))
        before = is_trained
    return runs

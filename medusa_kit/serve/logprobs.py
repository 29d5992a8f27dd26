"""Log-probabilities of tokens in the two forms that OpenAI's API has for them."""

from collections.abc import Sequence
from typing import Any

from medusa_kit.infer.details import TokenScore
from medusa_kit.infer.text.token_bytes import UNFINISHED

LEAST = -9999.0  # OpenAI's number for what cannot come; JSON has no -inf


def token_logprobs(
    tokenizer: Any, tokens: Sequence[int], scores: Sequence[TokenScore]
) -> list[dict[str, Any]]:
    """A chat's: an object for each token."""
    return [
        {
            **_entry(tokenizer, token, score.log_prob),
            "top_logprobs": [_entry(tokenizer, *one) for one in score.likeliest],
        }
        for token, score in zip(tokens, scores, strict=True)
    ]


def completion_logprobs(
    tokenizer: Any, tokens: Sequence[int], scores: Sequence[TokenScore], start: int
) -> dict[str, Any]:
    """A completion's: a list for each property. `start`: characters before these tokens."""
    texts = [text_of_token(tokenizer, token) for token in tokens]
    offsets = [start + sum(map(len, texts[:place])) for place in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [_finite(score.log_prob) for score in scores],
        "top_logprobs": [_by_text(tokenizer, score.likeliest) for score in scores],
        "text_offset": offsets,
    }


def _by_text(tokenizer: Any, likeliest: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Parts of a character, which have no text that tells them apart, by the vocabulary's word."""
    found = dict[str, float]()
    for token, log_prob in likeliest:
        text = text_of_token(tokenizer, token)
        if tokenizer is not None and (text in found or UNFINISHED in text):
            text = str(tokenizer.convert_ids_to_tokens(token))
        found[text] = _finite(log_prob)
    return found


def text_of_token(tokenizer: Any, token: int) -> str:
    return str(token) if tokenizer is None else str(tokenizer.decode([token]))


def _entry(tokenizer: Any, token: int, log_prob: float) -> dict[str, Any]:
    """Bytes are left out of a token that is part of a character."""
    text = text_of_token(tokenizer, token)
    whole = None if UNFINISHED in text else list(text.encode())
    return {"token": text, "logprob": _finite(log_prob), "bytes": whole}


def _finite(log_prob: float) -> float:
    return max(LEAST, log_prob)

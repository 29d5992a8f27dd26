"""Grammars whose steps would hold up everybody else's: they end alone, and soon."""

import threading

import pytest
import torch
from llguidance import LLParserLimits
from support.debug_model import small_tokenizer
from support.serving.grammars import PADDED, STOPS, tokenizer

from medusa_kit.base.gguf import CHATML_TEMPLATE
from medusa_kit.errors import MedusaKitError
from medusa_kit.infer.decode.accept import grammar as grammars
from medusa_kit.infer.decode.accept.grammar import GrammarMask, grammar_mask
from medusa_kit.infer.decode.grammars import source
from medusa_kit.settings.grammar import Grammar

AMBIGUOUS = Grammar.lark("start: a\na: a a a | a a | LETTER |\nLETTER: /[a-z ]/")
CONSTANT = Grammar.json_schema({"const": "ab " * 5000})
SOON = 60.0  # seconds after which a test has failed


def mask_of(grammar: Grammar) -> GrammarMask:
    return grammar_mask(grammar, tokenizer(), PADDED, frozenset(STOPS), 1)


def masked(mask: GrammarMask, answer: list[int]) -> torch.Tensor:
    return mask(torch.tensor([[7, *answer]]), torch.zeros(1, PADDED))


def ids_of(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize(
    ("limit", "grammar", "said"),
    [
        ("STEP_ITEMS", AMBIGUOUS, "Too many items .limit 100"),
        ("STEP_WORK", Grammar.regex("(.|\\n)*[a-m](.|\\n){40}"), "too many expressions"),
    ],
)
def test_a_step_that_takes_too_much_ends_the_answer(
    limit: str, grammar: Grammar, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance's own limits are a second for each step."""
    own = LLParserLimits()
    assert own.step_max_items > source.STEP_ITEMS
    assert own.step_lexer_fuel > source.STEP_WORK
    monkeypatch.setattr(source, limit, 100)
    mask = grammar_mask(grammar, small_tokenizer(CHATML_TEMPLATE), PADDED, frozenset(STOPS), 1)
    letters = ids_of("abcde" * 12)

    def steps() -> None:
        for count in range(len(letters)):
            masked(mask, letters[:count])

    with pytest.raises(MedusaKitError, match=said):
        steps()


def test_steps_have_a_budget_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = mask_of(Grammar.regex("[ab]+"))
    masked(mask, [])
    monkeypatch.setattr(grammars, "SECONDS_FREE", 0.0)
    monkeypatch.setattr(grammars, "SECONDS_EACH", 0.0)
    with pytest.raises(MedusaKitError, match="could not be followed after 0 tokens: that took"):
        masked(mask_of(Grammar.regex("[ab]+c")), [])


def test_a_long_text_that_has_to_follow_is_told_in_pieces() -> None:
    mask = mask_of(CONSTANT)
    told = mask.forced([7])
    assert 0 < len(told) <= grammars.MAX_FORCED
    assert mask.allows([7, *told])
    assert mask.forced([7, *told])


def test_one_grammar_is_made_while_another_is() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class HeldUp(Grammar):
        @property
        def text(self) -> str:  # type: ignore[override]
            begun.set()
            assert go_on.wait(SOON)
            return super().text

    slow = HeldUp("regex", "slow[0-9]")
    thread = threading.Thread(target=mask_of, args=(slow,))
    thread.start()
    try:
        assert begun.wait(SOON)
        assert mask_of(Grammar.regex("quick[0-9]")).allows([7, *ids_of("quick")])
    finally:
        go_on.set()
        thread.join()


def test_long_grammars_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = list[str]()

    class Read(Grammar):
        @property
        def text(self) -> str:  # type: ignore[override]
            reads.append("")
            return super().text

    def is_made(letter: str, length: int = 40) -> bool:
        """Whether it is compiled, which reads its text."""
        reads.clear()
        mask_of(Read("regex", letter * length))
        return bool(reads)

    monkeypatch.setattr(grammars, "MAX_KEPT", 100)
    assert [is_made(letter) for letter in "abcde"] == [True] * 5
    assert [is_made(letter) for letter in "deda"] == [False, False, False, True]
    assert [is_made(letter) for letter in "ade"] == [False, False, True]
    assert [is_made("f", 400), is_made("f", 400), is_made("e")] == [True, False, True]

"""Pieces of a streamed answer: their text, and who guessed what of it."""

import copy
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import pytest
from support.small_engines import engine_with_heads, lively_chat_base

from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.drafters.heads.medusa import MedusaDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.streaming import Piece, Span
from medusa_kit.infer.decode.request import Emitted
from medusa_kit.tree.candidate_tree import CandidateTree

MESSAGES = [{"role": "user", "content": "Tell me about rivers."}]


@pytest.fixture(scope="module")
def chat() -> Engine:
    return engine_with_heads(lively_chat_base(), CandidateTree.chain(3))


LETTER = byte_tokenizer().convert_tokens_to_ids("a")  # a character by itself
ALWAYS = {LETTER: 100.0}  # a bias with which the model says nothing else
NAMES = ["medusa", "suffix", "prompt-lookup", "auto"]


@pytest.fixture
def knowing_heads(chat: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that guess LETTER everywhere."""

    def fill(self: Any, hidden_BD: Any, roots_B: Any, *_: Any, **__: Any) -> Any:
        tokens_BN = roots_B[:, None].repeat(1, self.num_nodes)
        tokens_BN[:, 1:] = LETTER
        return tokens_BN

    monkeypatch.setattr(MedusaDrafter, "fill", fill)
    monkeypatch.setattr(chat.heads, "guesser", None)  # which fills trees in C++


def spans_of(engine: Engine, **options: Any) -> tuple[list[Span], Any]:
    streaming = engine.stream(MESSAGES, **options)
    pieces = list(streaming)
    assert [str(one) for one in pieces] == ["".join(s.text for s in one.spans) for one in pieces]
    assert "".join(pieces) == streaming.result.text
    return [span for one in pieces for span in one.spans], streaming.result.stats


def test_plain_decoding_guesses_nothing(chat: Engine) -> None:
    spans, _ = spans_of(chat, max_new_tokens=60, drafter="none")
    assert {span.guessed_by for span in spans} == {None}


@pytest.mark.parametrize("count", [30, 31, 32])  # cut within an accepted path too
@pytest.mark.parametrize("drafter", NAMES)
def test_accepted_tokens_name_who_guessed_them(
    chat: Engine, knowing_heads: None, drafter: str, count: int
) -> None:
    spans, stats = spans_of(chat, max_new_tokens=count, drafter=drafter, logit_bias=ALWAYS)
    assert [span.text for span in spans] == ["a"] * count
    found = Counter(span.guessed_by for span in spans)
    accepted = round(sum(stats.acceptance_by_depth) * stats.num_steps)
    assert 0 < count - found[None] == accepted
    several = {"medusa", "suffix", "recycling"}
    assert found.keys() - {None} <= (several if drafter == "auto" else {drafter})


def test_of_several_sources_the_one_that_guessed_is_named(chat: Engine) -> None:
    """These heads know nothing of LETTER; the text does."""
    spans, _ = spans_of(chat, max_new_tokens=30, drafter="auto", logit_bias=ALWAYS)
    assert {span.guessed_by for span in spans} == {None, "suffix"}


def test_the_first_token_is_the_base_models_own(chat: Engine, knowing_heads: None) -> None:
    spans, _ = spans_of(chat, max_new_tokens=6, drafter="medusa", logit_bias=ALWAYS)
    by = [span.guessed_by for span in spans]
    assert by == [None, "medusa", "medusa", "medusa", None, "medusa"]


def test_text_held_back_for_a_stop_string_keeps_its_guessers(
    chat: Engine, knowing_heads: None
) -> None:
    spans, _ = spans_of(
        chat, max_new_tokens=8, drafter="medusa", logit_bias=ALWAYS, stop="a" * 4 + "b"
    )
    assert "".join(span.text for span in spans) == "a" * 8


HALF = byte_tokenizer()("é").input_ids[-2]  # a byte that is no character by itself


@pytest.mark.parametrize("drafter", ["none", "medusa"])
@pytest.mark.parametrize("token", [LETTER, HALF, None])
def test_every_token_is_counted(
    chat: Engine, knowing_heads: None, drafter: str, token: int | None
) -> None:
    """Those too that stand for no text of their own. None: the end of the answer, at once."""
    (end,) = chat.base.stop_token_ids
    bias = {end if token is None else token: 100.0}
    streaming = chat.stream(MESSAGES, max_new_tokens=10, drafter=drafter, logit_bias=bias)
    text = "".join(streaming)
    result = streaming.result
    assert len(result.token_ids) == (1 if token is None else 10)
    assert sum(streaming.guessed.values()) == len(result.token_ids)
    assert len(text) == {LETTER: 10, HALF: 10, None: 0}[token]
    accepted = round(sum(result.stats.acceptance_by_depth) * result.stats.num_steps)
    assert streaming.guessed["medusa"] == accepted
    assert (accepted > 0) == (drafter == "medusa" and token == LETTER)


def test_speed_so_far(chat: Engine) -> None:
    streaming = chat.stream(MESSAGES, max_new_tokens=20)
    assert streaming.tokens_per_second == 0.0
    next(streaming)
    assert streaming.tokens_per_second > 0
    assert list(streaming)
    assert streaming.tokens_per_second == streaming.result.stats.tokens_per_second


def test_pieces_are_strings_that_can_be_copied() -> None:
    piece = Piece([Span("a ", "medusa"), Span("b", None)])
    assert (piece, piece + "!", isinstance(piece, str)) == ("a b", "a b!", True)
    for other in (copy.copy(piece), copy.deepcopy(piece), pickle.loads(pickle.dumps(piece))):
        assert (other, other.spans) == (piece, piece.spans)


def test_the_newest_tree_with_draft_tokens_is_kept_where_it_is_asked_for(
    chat: Engine, knowing_heads: None
) -> None:
    """Also where the last step had room for one token alone."""
    options: dict[str, Any] = {"max_new_tokens": 30, "drafter": "medusa", "logit_bias": ALWAYS}
    silent = chat.stream(MESSAGES, **options)
    assert "".join(silent)
    assert silent.tree is None
    streaming = chat.stream(MESSAGES, **options)
    streaming.keep_tree()
    assert "".join(streaming) == silent.result.text
    tree = streaming.tree
    assert tree is not None
    assert tree.parents == [-1, 0, 1, 2][: len(tree.parents)]
    assert len(tree.tokens) == len(tree.parents) > 1
    assert tree.accepted == list(range(1, len(tree.accepted) + 1)) != []
    plain = chat.stream(MESSAGES, max_new_tokens=4, drafter="none")
    plain.keep_tree()
    assert "".join(plain)
    assert plain.tree is None


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
def test_what_a_thread_of_the_parent_reads_may_be_closed_in_a_forked_child(chat: Engine) -> None:
    streaming, inside, go_on = chat.stream(MESSAGES, max_new_tokens=4), Event(), Event()
    steps = streaming._steps

    def waiting() -> Iterator[Emitted]:
        inside.set()
        assert go_on.wait(30)
        yield from steps()

    streaming._steps = waiting
    reader = Thread(target=lambda: list(streaming))
    reader.start()
    assert inside.wait(30)
    if (child := os.fork()) == 0:
        try:
            streaming.close()
            os._exit(0)
        except BaseException:
            os._exit(1)
    go_on.set()
    reader.join(30)
    assert os.waitpid(child, 0)[1] == 0
    assert streaming.result.stats.new_tokens == 4

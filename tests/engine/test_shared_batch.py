"""`Engine.shared_batch`: threads that ask at the same time get what each gets from `generate`."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from support.batches import engine_for
from support.callers import DRAFTERS, Words, all_at_once, requests_of
from support.small_engines import build_engine as built
from support.small_engines import random_heads, random_prompt
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ClosedError, ConfigError, DeviceMemoryError

FAMILIES = ["llama-tied", "gemma3", "gpt2"]  # the first two in C++, where it can be built
SOON = 60.0  # seconds after which a test has failed


def speaking_engine(family: str = "llama-tied", **options: Any) -> Engine:
    base = wrap_model(tiny_model(family), Words(), family)
    return built(base, heads=random_heads(base), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_get_what_generate_gives(family: str) -> None:
    """With their own drafters, seeds and sampling, more of them than rows."""
    engine = engine_for(family)
    requests = requests_of(12)
    requests += [{**requests[n], "drafter": name} for n, name in ((0, "suffix"), (2, "recycling"))]
    expected = [engine.generate(**one) for one in requests]
    with engine.shared_batch(max_rows=3, max_pause=0.001) as shared:
        found = all_at_once(lambda n: [shared.generate(**one) for one in requests[n::4]], 4)
    for number, answers in enumerate(found):
        for answer, alone in zip(answers, expected[number::4], strict=True):
            assert (answer.token_ids, answer.finish_reason) == (
                alone.token_ids,
                alone.finish_reason,
            )
            assert answer.stats.prompt_tokens == alone.stats.prompt_tokens
            assert answer.stats.drafter.split()[0] == alone.stats.drafter.split()[0]
            assert (answer.stats.num_steps > 0) == (len(alone.token_ids) > 1)


def test_rows_that_ask_alike_draft_together() -> None:
    """Whatever their sampling; a drafter lives as long as a row that it drafts for."""
    engine = engine_for("llama-tied")
    prompt = random_prompt(6, 6)

    def drafter_of(answer: Any) -> Any:
        return answer.submission.drafter

    with engine.shared_batch(max_rows=2) as shared:
        ask: Any = lambda **options: shared.submit(prompt, max_new_tokens=4, **options)  # noqa: E731
        for name in (*DRAFTERS, "suffix", "recycling", "prompt-lookup"):
            first, second = ask(drafter=name), ask(drafter=name, temperature=1.0, seed=3)
            assert drafter_of(first) is drafter_of(second)
        same = [ask(drafter="suffix", drafter_options=o) for o in (None, {}, {"max_match": 7})]
        assert drafter_of(same[0]) is drafter_of(same[1])
        assert drafter_of(same[0]) is not drafter_of(same[2])
        for answer in same:
            answer.result()
        known = len(shared._drafters)
        del first, second, same, answer
        gc.collect()
        shared.generate(prompt, max_new_tokens=2, drafter="none")  # the batch lets go of the rest
        gc.collect()
        assert len(shared._drafters) < known


@pytest.mark.parametrize("drafter", ["medusa", "auto", "none"])
def test_text_comes_in_the_pieces_of_a_stream(drafter: str) -> None:
    engine = speaking_engine()
    options: dict[str, Any] = {"max_new_tokens": 12, "drafter": drafter}
    prompts = [random_prompt(n, n) for n in (5, 9, 7)]
    with engine.shared_batch(max_rows=2) as shared:
        streams = [shared.stream(prompt, **options) for prompt in prompts]
        for prompt, streamed in zip(prompts, streams, strict=True):
            pieces = list(streamed)
            alone = engine.generate(prompt, **options)
            assert "".join(pieces) == alone.text == streamed.result.text
            assert sum(streamed.guessed.values()) == len(alone.token_ids)
            guessers = {span.guessed_by for piece in pieces for span in piece.spans}
            sources = {"medusa", "suffix", "recycling"} if drafter == "auto" else {drafter}
            assert guessers <= {None, *sources}
    assert drafter != "medusa" or "medusa" in guessers


def test_a_stop_string_ends_an_answer() -> None:
    engine = speaking_engine()
    prompt = random_prompt(5, 5)
    stop = str(engine.generate(prompt, max_new_tokens=12).token_ids[4])
    with engine.shared_batch() as shared:
        found = shared.generate(prompt, max_new_tokens=12, stop=stop)
    alone = engine.generate(prompt, max_new_tokens=12, stop=stop)
    assert (found.text, found.finish_reason) == (alone.text, "stop")


def test_answers_are_cancelled_by_closing_their_streams() -> None:
    """Also while another thread waits for the next piece."""
    engine = speaking_engine()
    held, go_on = threading.Event(), threading.Event()

    def hold(_: list[int]) -> None:
        held.set()
        assert go_on.wait(SOON)

    with engine.shared_batch(max_rows=1) as shared:
        prompt = random_prompt(5, 5)
        first = shared.submit(prompt, max_new_tokens=4, on_tokens=hold)
        assert held.wait(SOON)
        waiting = shared.submit(random_prompt(7, 7), max_new_tokens=12)
        stream, pieces = waiting.stream(), list[str]()
        reader = threading.Thread(target=lambda: pieces.extend(stream))
        reader.start()
        closer = threading.Thread(target=stream.close)
        closer.start()
        go_on.set()
        for thread in (reader, closer):
            thread.join(SOON)
            assert not thread.is_alive()
        assert waiting.result().finish_reason == "cancelled"
        assert first.result().token_ids == engine.generate(prompt, max_new_tokens=4).token_ids
        answer = shared.submit(prompt, max_new_tokens=12)
        answer.cancel()
        assert answer.result().finish_reason in ("cancelled", "length")


def test_what_nobody_holds_any_more_ends() -> None:
    """An answer that was dropped is cancelled, a batch that was dropped ends with its answers."""
    engine, prompt = speaking_engine(), random_prompt(7, 7)
    alone = engine.generate(prompt, max_new_tokens=12)
    held, go_on = threading.Event(), threading.Event()

    def hold(_: list[int]) -> None:
        held.set()
        assert go_on.wait(SOON)

    with engine.shared_batch(max_rows=1) as shared:
        first = shared.submit(random_prompt(5, 5), max_new_tokens=4, on_tokens=hold)
        assert held.wait(SOON)
        dropped = shared.submit(random_prompt(9, 9), max_new_tokens=12)
        request = dropped.submission.request
        del dropped
        gc.collect()
        unheard = shared.submit(prompt, max_new_tokens=12, on_tokens=lambda _: None)
        whole = unheard.submission.request
        del unheard
        gc.collect()
        go_on.set()
        assert shared.generate(prompt, max_new_tokens=12).token_ids == alone.token_ids
        assert request.finish_reason == "cancelled"
        assert whole.token_ids == alone.token_ids  # it has somebody to tell
        assert len(first.result().token_ids) == 4
    lone = engine.shared_batch()
    queue, alive = lone._queue, weakref.ref(lone)
    answer, streamed = (ask(prompt, max_new_tokens=12) for ask in (lone.submit, lone.stream))
    del lone
    gc.collect()
    assert alive() is None
    assert answer.result().token_ids == alone.token_ids
    assert "".join(streamed) == alone.text
    assert queue._ended.wait(SOON)
    assert engine.scheduler.idle
    assert not engine.scheduler.batches.used


@pytest.mark.parametrize("prefix_cache", ["on", "off"])
def test_what_earlier_prompts_began_with_is_read_once(prefix_cache: str) -> None:
    engine = speaking_engine(prefix_cache=prefix_cache)
    prompt = random_prompt(40, 1)
    with engine.shared_batch(max_rows=2) as shared:
        answers = [shared.generate(prompt, max_new_tokens=6) for _ in range(2)]
        assert shared.stats.cached_tokens >= 40
    alone = engine.generate(prompt, max_new_tokens=6)
    assert [one.token_ids for one in answers] == [alone.token_ids] * 2
    cached = [one.stats.cached_tokens for one in answers]
    assert cached == ([0, 39] if prefix_cache == "on" else [0, 0])


@pytest.mark.parametrize("error", [MemoryError("2 GB"), torch.OutOfMemoryError("2 GB")])
def test_a_batch_that_has_no_room_is_refused_in_words(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for("gpt2")

    def full(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.verifier), "new_cache", full)
        with pytest.raises(DeviceMemoryError, match=r"no room for a batch of 3 requests .2 G"):
            engine.shared_batch(max_rows=3)
    with engine.shared_batch(max_rows=3) as shared:
        assert shared.generate([3, 4, 5], max_new_tokens=2).token_ids


def test_what_cannot_be_done_is_refused_at_once() -> None:
    engine = engine_for("gpt2")
    for options, message in (
        ({"max_rows": 0}, "max_rows 0 is out of range"),
        ({"most_waiting": -1}, "most_waiting -1 is out of range"),
        ({"max_pause": 0}, "max_pause 0 is out of range"),
        ({"max_pause": "soon"}, "max_pause 'soon' is out of range"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.shared_batch(**options)  # type: ignore[arg-type]
    with engine.shared_batch(max_rows=1) as shared:
        for ask, message in (
            ({"prompt": [[3], [4]]}, "submit was given 2 prompts"),
            ({"prompt": [3], "drafter": "magic"}, "drafter 'magic' is unknown"),
            ({"prompt": [3], "drafter": "suffix", "drafter_options": {"x": 1}}, "no option"),
            ({"prompt": [3], "temperature": -1}, "temperature"),
            ({"prompt": []}, "no prompt"),
        ):
            with pytest.raises(ConfigError, match=message):
                shared.submit(**ask)
        assert shared.generate([3, 4, 5], max_new_tokens=2).finish_reason in ("length", "stop")
    with pytest.raises(ClosedError):
        shared.generate([3])

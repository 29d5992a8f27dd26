"""The Python API: prompts of every kind, results, streams, statistics, and what it refuses."""

import subprocess
import sys

import pytest
import torch
from support.small_engines import BUSHY, engine_with_heads, lively_chat_base, random_prompt
from support.tiny_models import CONTEXT, STOP

import medusa_kit
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError, ContextLengthError, TreeError
from medusa_kit.tree.candidate_tree import CandidateTree

MESSAGES = [{"role": "user", "content": "Tell me about rivers."}]


@pytest.fixture(scope="module")
def chat() -> Engine:
    return engine_with_heads(lively_chat_base())


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_with_heads()


def test_a_prompt_is_messages_or_text_or_ids(chat: Engine) -> None:
    ids = chat.encode(MESSAGES)
    by_messages = chat.generate(MESSAGES, max_new_tokens=12)
    assert chat.generate(MESSAGES[0]["content"], max_new_tokens=12).text == by_messages.text
    for given in (ids, tuple(ids), torch.tensor(ids)):
        assert chat.generate(given, max_new_tokens=12).token_ids == by_messages.token_ids
        streaming = chat.stream(given, max_new_tokens=12)
        assert "".join(streaming) == by_messages.text
    assert by_messages.stats.prompt_tokens == len(ids)


def test_many_prompts_come_back_in_order_whatever_the_batch(engine: Engine) -> None:
    prompts = [random_prompt(3 + 5 * seed, seed) for seed in range(5)]
    alone = [engine.generate(prompt, max_new_tokens=20).token_ids for prompt in prompts]
    assert len({tuple(ids) for ids in alone}) > 2
    for batch_size in (2, 8):
        together = engine.generate(prompts, max_new_tokens=20, batch_size=batch_size)
        assert [result.token_ids for result in together] == alone


def test_statistics_add_up(engine: Engine) -> None:
    for drafter in ("medusa", "none"):
        result = engine.generate(random_prompt(9, 3), max_new_tokens=40, drafter=drafter)
        stats = result.stats
        assert stats.drafter == drafter
        assert stats.new_tokens == len(result.token_ids)
        # each verify forward emits one token and what it accepted; the prefill emits one more
        accepted = sum(stats.acceptance_by_depth) * stats.num_steps
        assert accepted + stats.num_steps == pytest.approx(stats.new_tokens - 1, abs=1)
        assert stats.acceptance_length == (stats.new_tokens - 1) / stats.num_steps
        assert stats.tokens_per_second == pytest.approx(stats.new_tokens / stats.seconds)
        if drafter == "none":
            assert stats.acceptance_length == 1.0
    assert set(stats.as_dict()) >= {"acceptance_length", "tokens_per_second", "seconds"}


def test_finish_reasons_and_the_stop_token_stays(engine: Engine) -> None:
    reasons = {}
    for seed in range(12):
        result = engine.generate(random_prompt(4, seed), max_new_tokens=60)
        reasons.setdefault(result.finish_reason, result)
    assert set(reasons) == {"stop", "length"}
    assert reasons["stop"].token_ids[-1] == STOP
    assert STOP not in reasons["stop"].token_ids[:-1]
    assert len(reasons["length"].token_ids) == 60


def test_streamed_pieces_are_the_text(chat: Engine) -> None:
    for arguments in ({}, {"temperature": 0.9, "seed": 3}):
        whole = chat.generate(MESSAGES, max_new_tokens=30, **arguments)
        streaming = chat.stream(MESSAGES, max_new_tokens=30, **arguments)
        pieces = list(streaming)
        assert "".join(pieces) == whole.text
        assert len(pieces) > 3
        assert streaming.result.token_ids == whole.token_ids


def test_a_stream_left_early_holds_what_there_is(chat: Engine) -> None:
    streaming = chat.stream(MESSAGES, max_new_tokens=60)
    iterator = iter(streaming)
    first = next(iterator)
    result = streaming.result
    assert result.finish_reason == "cancelled"
    assert result.text.startswith(first)
    assert 0 < len(result.token_ids) < 60


def test_a_stream_is_read_once(chat: Engine) -> None:
    streaming = chat.stream(MESSAGES, max_new_tokens=30)
    first = next(iter(streaming))
    rest = "".join(streaming)
    whole = chat.generate(MESSAGES, max_new_tokens=30)
    assert first + rest == whole.text
    assert list(streaming) == []
    assert streaming.result.token_ids == whole.token_ids


def test_a_closed_stream_ends(chat: Engine) -> None:
    streaming = chat.stream(MESSAGES, max_new_tokens=30)
    next(streaming)
    so_far = streaming.result.token_ids
    streaming.close()
    assert list(streaming) == []
    assert streaming.result.token_ids == so_far


OPEN_AT_EXIT = """
import medusa_kit
engine = medusa_kit.load("debug-tiny", heads="untrained", tree=[[0], [0, 0]], device="cpu")
streams = [iter(engine.stream("hi", max_new_tokens=60)) for _ in range(3)]
for stream in streams:
    next(stream)
streams.append(streams)  # in a cycle, so that they last as long as the interpreter
print("open")
"""


@pytest.mark.slow
def test_streams_that_are_open_at_exit_leave_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", OPEN_AT_EXIT],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "open"
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_a_stop_token_that_is_a_word_is_no_part_of_the_text(chat: Engine) -> None:
    config = chat.base.model.generation_config
    free = chat.generate(MESSAGES, max_new_tokens=40)
    stop, before = free.token_ids[7], config.eos_token_id
    try:
        config.eos_token_id = [stop]
        result = chat.generate(MESSAGES, max_new_tokens=40)
        streamed = "".join(chat.stream(MESSAGES, max_new_tokens=40))
    finally:
        config.eos_token_id = before
    assert chat.base.tokenizer.decode([stop]) != ""
    assert result.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert result.text == streamed == chat.base.tokenizer.decode(result.token_ids[:-1])


def test_a_stop_string_cuts_text_alike_for_every_drafter(chat: Engine) -> None:
    text = chat.generate(MESSAGES, max_new_tokens=40).text
    stop = text[len(text) // 2 :][:2]
    results = [chat.generate(MESSAGES, max_new_tokens=40, stop=stop, drafter=drafter)
               for drafter in ("medusa", "none")]  # fmt: skip
    assert results[0].token_ids == results[1].token_ids
    assert results[0].text == text[: text.index(stop)]
    assert {result.finish_reason for result in results} == {"stop"}
    streamed = "".join(chat.stream(MESSAGES, max_new_tokens=40, stop=stop))
    assert streamed == results[0].text


def test_near_the_contexts_end_answers_shrink(engine: Engine) -> None:
    engine.base.model.generation_config.eos_token_id = None
    for left in (1, 2, 5):
        result = engine.generate(random_prompt(CONTEXT - left, 1), max_new_tokens=50)
        assert 1 <= len(result.token_ids) <= left
    with pytest.raises(ContextLengthError, match=f"{CONTEXT} tokens"):
        engine.generate(random_prompt(CONTEXT, 1))


def test_what_cannot_be_done_is_refused(engine: Engine) -> None:
    ids = [5, 6, 7]
    for bad, message in [
        (lambda: engine.generate(ids, drafter="medusaa"), "did you mean medusa"),
        (lambda: engine.generate([]), "no prompt"),
        (lambda: engine.generate([5, 96]), r"96 is out of range; expected 0\.\.95"),
        (lambda: engine.generate([5, 2.7]), "token id 2.7"),
        (lambda: engine.generate([5, True]), "token id True"),
        (lambda: engine.generate("text"), "without a tokenizer"),
        (lambda: engine.generate(ids, max_new_tokens=0), "max_new_tokens 0"),
        (lambda: engine.generate(ids, max_new_tokens=4.0), "max_new_tokens 4.0 .* an integer"),
        (lambda: engine.generate(ids, max_new_tokens=None), "max_new_tokens None"),
        (lambda: engine.generate(ids, max_new_tokens=True), "max_new_tokens True"),
        (lambda: engine.generate(ids, batch_size=-1), "batch_size -1"),
        (lambda: engine.stream([ids, ids]), "stream was given 2 prompts"),
        (lambda: engine.generate(ids, stop=["a", ""]), "stop string is empty"),
        (lambda: engine.generate(ids, stop=3), "stop 3 is of type int; expected a string or a"),
        (lambda: engine.generate(ids, stop=["sky", None]), "stop None is of type NoneType"),
        (lambda: engine.generate(MESSAGES[0]), r"is of type dict; (?s:.*)\[\{'role"),
        (lambda: engine.generate([ids, None]), "prompt None is of type NoneType; expected"),
        (lambda: engine.generate(ids, drafter="suffix", drafter_options=[1]),
         r"drafter_options \[1\] is of type list; expected a mapping"),
        (lambda: engine.generate(ids, temperature=-1), "temperature -1"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            bad()
    with pytest.raises(TreeError, match="depth 4"):
        engine.use_tree(CandidateTree.chain(4))
    assert engine.tree == BUSHY
    plain = Engine(engine.verifier, engine.check, engine.scheduler)
    with pytest.raises(ConfigError, match="no heads"):
        plain.generate(ids, drafter="medusa")
    assert plain.generate(ids, max_new_tokens=3).stats.drafter == "none"


def test_the_package_offers_load() -> None:
    engine = medusa_kit.load("debug-tiny", heads="untrained", tree=[[0], [0, 0]], device="cpu")
    usual = engine.generate("hi", max_new_tokens=5)
    assert usual.stats.drafter.startswith("auto (")
    medusa = engine.generate("hi", max_new_tokens=5, drafter="medusa")
    assert medusa.stats.drafter.startswith("medusa")
    assert medusa.token_ids == usual.token_ids

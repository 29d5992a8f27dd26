"""What the Python API offers beside answers: names, an end, several answers, scores, progress."""

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_engines import engine_with_heads, lively_chat_base, random_prompt

import medusa_kit
from medusa_kit.drafters.factory import build_drafter
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ClosedError, ConfigError
from medusa_kit.infer.decode.drafter import Drafter

ROOT = Path(__file__).parents[2]
MESSAGES = [{"role": "user", "content": "Tell me about rivers."}]


@pytest.fixture(scope="module")
def chat() -> Engine:
    return engine_with_heads(lively_chat_base())


def test_an_engine_is_one_line(chat: Engine) -> None:
    assert len(repr(chat)) < 120
    for said in (chat.base.info.name, "float32", "cpu", " heads", f"drafter {chat.own_drafter}"):
        assert said in repr(chat)


def test_dir_has_the_documented_names_and_no_others(chat: Engine) -> None:
    page = (ROOT / "docs/python.md").read_text()
    names = dir(chat)
    assert names == sorted(names)
    for name in (*names, *medusa_kit.__all__):
        assert f"`{name}`" in page or f"`{name}(" in page, name
        assert hasattr(chat if name in names else medusa_kit, name)
    assert not [name for name in names if name.startswith("_")]


def test_a_closed_engine_has_let_go_of_its_model() -> None:
    with engine_with_heads() as engine:
        engine.generate([3, 4, 5], max_new_tokens=3)
        model = weakref.ref(engine.base.model)
    gc.collect()
    assert model() is None
    assert repr(engine) == "Engine(closed)"
    for call in (lambda: engine.generate([3]), lambda: engine.stream([3]), lambda: engine.base):
        with pytest.raises(ClosedError, match="this engine is closed"):
            call()
    for name in ("heads", "drafter", "plan", "tree", "check"):
        with pytest.raises(ClosedError):
            getattr(engine, name)
    engine.close()
    with pytest.raises(ClosedError), engine:
        pass
    with pytest.raises(AttributeError, match="has no attribute 'genrate'"):
        engine_with_heads().genrate  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("max_tokens", "max_new_tokens"), ("temprature", "temperature"), ("stops", "stop"),
     ("batchsize", "batch_size"), ("logprob", "logprobs"), ("drafters", "drafter"),
     ("num_return_sequences", "n"), ("stop_strings", "stop"), ("response_format", "grammar"),
     ("do_sample", "temperature"), ("output_scores", "logprobs"), ("assistant_model", "drafter")],
)  # fmt: skip
def test_an_unknown_keyword_names_the_nearest(chat: Engine, wrong: str, near: str) -> None:
    options: dict[str, Any] = {wrong: 3}
    for call in (chat.generate, chat.stream, chat.conversation().send):
        with pytest.raises(ConfigError, match=f"option '{wrong}' is unknown") as caught:
            call("hi", **options)
        assert caught.value.hint == f"did you mean {near}?"


def test_a_keyword_of_another_call_is_not_offered_for_itself(chat: Engine) -> None:
    options: dict[str, Any] = {"n": 2}
    with pytest.raises(ConfigError, match="option 'n' is unknown") as caught:
        chat.stream("hi", **options)
    assert caught.value.hint == "`Engine.generate` takes it, this call does not"


def test_several_answers_are_those_of_the_next_seeds(chat: Engine) -> None:
    drawn = {"max_new_tokens": 12, "temperature": 1.0}
    alone = [chat.generate(MESSAGES, seed=seed, **drawn).text for seed in (4, 5, 6)]
    assert len(set(alone)) > 1
    together = chat.generate(MESSAGES, n=3, seed=4, **drawn)
    assert [result.text for result in together] == alone
    lists = chat.generate(["One", MESSAGES], n=2, seed=4, batch_size=3, **drawn)
    assert [len(results) for results in lists] == [2, 2]
    assert [result.text for result in lists[1]] == alone[:2]
    for wrong in (0, True, 1.5):
        with pytest.raises(ConfigError, match=r"n .* is out of range"):
            chat.generate(MESSAGES, n=wrong)


def test_log_probabilities_are_the_base_models(chat: Engine) -> None:
    prompts = [random_prompt(5, seed) for seed in (1, 2, 3)]
    results = chat.generate(prompts, max_new_tokens=20, logprobs=3)
    assert chat.generate(prompts[0], max_new_tokens=4).logprobs is None
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.logprobs) == len(result.token_ids)
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *result.token_ids]])
            expected_TV = chat.base.model(ids).logits[0].log_softmax(-1)[len(prompt) - 1 :]
        for t, (token, score) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
            assert score.log_prob == pytest.approx(float(expected_TV[t, token]), abs=1e-3)
            assert len(score.top_tokens) == 3
    streaming = chat.stream(prompts[0], max_new_tokens=20, logprobs=0)
    list(streaming)
    assert [score.log_prob for score in streaming.result.logprobs] == pytest.approx(
        [score.log_prob for score in results[0].logprobs], abs=1e-3
    )
    for wrong in (-1, False, 1.5):
        with pytest.raises(ConfigError, match=f"logprobs {wrong} is out of range"):
            chat.generate(prompts, logprobs=wrong)  # type: ignore[arg-type]


def test_scores_end_where_a_stop_string_ends_the_answer(chat: Engine) -> None:
    whole = chat.generate(MESSAGES, max_new_tokens=30)
    stop = whole.text[len(whole.text) // 2 :][:3]
    cut = chat.generate(MESSAGES, max_new_tokens=30, stop=stop, logprobs=0)
    assert len(cut.logprobs) == len(cut.token_ids) < len(whole.token_ids)


def test_pieces_come_to_an_event_loop(chat: Engine) -> None:
    async def read(seed: int) -> str:
        stream = chat.stream(MESSAGES, max_new_tokens=20, temperature=0.9, seed=seed)
        return "".join([piece async for piece in stream])

    async def both() -> list[str]:
        return await asyncio.gather(read(1), read(2))

    expected = [
        chat.generate(MESSAGES, max_new_tokens=20, temperature=0.9, seed=seed).text
        for seed in (1, 2)
    ]
    assert asyncio.run(both()) == expected


def test_an_error_of_a_stream_reaches_the_event_loop(
    chat: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = chat.stream(MESSAGES, max_new_tokens=20)

    async def read() -> None:
        async for _ in stream:
            monkeypatch.setattr(stream, "_pieces", iter(_failing()))

    with pytest.raises(ConfigError, match="as asked"):
        asyncio.run(read())


def _failing() -> Any:
    yield from ()
    raise ConfigError("as asked")


def test_progress_of_a_list(chat: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [random_prompt(5, seed) for seed in (1, 2, 3)]
    plain = chat.generate(prompts, max_new_tokens=5)
    assert capsys.readouterr().err == ""
    shown = chat.generate(prompts, max_new_tokens=5, progress=True, batch_size=2)
    assert "answering: 3 of 3" in capsys.readouterr().err
    assert [one.token_ids for one in shown] == [one.token_ids for one in plain]


def test_a_drafter_may_be_an_object(chat: Engine) -> None:
    own = build_drafter("suffix", chat._draft_context(1, None))
    assert isinstance(own, Drafter)
    prompt = [5, 6, 7, 8] * 6
    expected = chat.generate(prompt, max_new_tokens=20, drafter="none").token_ids
    result = chat.generate(prompt, max_new_tokens=20, drafter=own)
    assert (result.token_ids, result.stats.drafter) == (expected, "suffix")
    streaming = chat.stream(prompt, max_new_tokens=20, drafter=own)
    list(streaming)
    assert streaming.result.token_ids == expected
    assert set(streaming.guessed) <= {"suffix", None}
    with pytest.raises(ConfigError, match="no meaning with a drafter that is an object"):
        chat.generate(prompt, drafter=own, drafter_options={"num_nodes": 3})
    with pytest.raises(ConfigError, match="takes a drafter by its name"), chat.shared_batch() as b:
        b.submit(prompt, drafter=own)


def test_unknown_roles_are_errors(chat: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [{"role": "asistant", "content": "hi"}]
    for call in (chat.generate, chat.stream, chat.encode):
        with pytest.raises(ConfigError, match="role 'asistant' is unknown; expected one of"):
            call(wrong)
    with pytest.raises(ConfigError) as caught:
        chat.encode([{"role": "usr", "content": "hi"}])
    assert caught.value.hint == "did you mean user?"
    with pytest.raises(ConfigError, match="role None is unknown") as caught:
        chat.encode([{"content": "hi"}])
    assert caught.value.hint is None, "no word is near to what is no text"
    template = chat.base.tokenizer.chat_template
    monkeypatch.setattr(chat.base.tokenizer, "chat_template", "{# 'asistant' #}" + template)
    assert chat.encode(wrong)

"""How a chat and `generate` choose tokens: as the person says, else as the model's own config asks,
else greedily."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.debug_model import MODEL, plain_text
from transformers import GenerationConfig

import medusa_kit
from medusa_kit.base import files
from medusa_kit.cli.chat.conversation import Answered, Chat, Pace
from medusa_kit.engine.engine import Engine

Run = Callable[..., tuple[int, str, str]]
OWN = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.1}


@pytest.fixture
def asked(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], str]]:
    """(sampling options that reach the engine, stderr) of a chat with a model that has this
    generation config."""
    seen: list[dict[str, Any]] = []
    original = Engine.stream

    def stream(self: Engine, prompt: Any, **settings: Any) -> Any:
        seen.append(settings)
        return original(self, prompt, **settings)

    def ask(own: dict[str, Any], *options: object) -> tuple[dict[str, Any], str]:
        load = medusa_kit.load

        def with_config(model: str, **arguments: Any) -> Engine:
            engine = load(model, **arguments)
            engine.base.model.generation_config = GenerationConfig(**own)
            return engine

        lines = iter(["Name a tree."])
        monkeypatch.setattr("builtins.input", lambda _: next(lines, "/exit"))
        monkeypatch.setattr(Engine, "stream", stream)
        monkeypatch.setattr("medusa_kit.engine.load.load", with_config)
        code, _, err = run("chat", *MODEL, "--heads", "none", "-n", "4", *options)
        assert code == 0, err
        names = ("temperature", "top_k", "top_p", "min_p")
        return {name: seen[-1][name] for name in names if seen[-1][name] is not None}, err

    return ask


CASES: dict[str, tuple[dict[str, Any], list[str], dict[str, float], str]] = {
    "neither": ({}, [], {"temperature": 0.0}, "greedy: always the likeliest token"),
    "own": (OWN, [], {"temperature": 0.6, "top_p": 0.9},
            "sampling at temperature 0.6, top_p 0.9, seed 0 (the model's own)"),
    "own without a temperature": ({"do_sample": True, "top_k": 40}, [],
                                  {"temperature": 1.0, "top_k": 40}, "the model's own"),
    "own greedy": ({"do_sample": False, "temperature": 0.6}, [], {"temperature": 0.0}, "greedy: "),
    "own temperature alone": ({"temperature": 0.6}, [], {"temperature": 0.6}, "(the model's own)"),
    "given wins": (OWN, ["--temperature", "1.5"], {"temperature": 1.5, "top_p": 0.9},
                   "temperature 1.5, top_p 0.9, seed 0 (the model's own where none was"),
    "all given": (OWN, ["--temperature", "1.5", "--top-p", "0.5", "--seed", "7"],
                  {"temperature": 1.5, "top_p": 0.5},
                  "sampling at temperature 1.5, top_p 0.5, seed 7 (as given)"),
    "a long seed": ({}, ["--temperature", "0.5", "--seed", f"{10**400 + 7}"], {"temperature": 0.5},
                    f"sampling at temperature 0.5, seed {10**400 + 7} (as given)"),
    "many tokens": ({}, ["--top-k", f"{10**400}", "--seed", "1234567"],
                    {"temperature": 1.0, "top_k": 10**400}, "seed 1234567 (as given)"),
    "part given": ({}, ["--top-k", "5"], {"temperature": 1.0, "top_k": 5},
                   "temperature 1, top_k 5, seed 0 (as given)"),
    "nothing narrowed": ({}, ["--top-p", "1"], {"temperature": 0.0}, "greedy: "),
    "typical": ({}, ["--acceptance", "typical"], {"temperature": 1.0}, "temperature 1, seed 0"),
    "greedy": (OWN, ["--greedy"], {"temperature": 0.0}, "greedy: always the likeliest token"),
    "temperature 0": (OWN, ["--temperature", "0"], {"temperature": 0.0}, "greedy: "),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_what_a_chat_samples_with(asked: Any, case: str) -> None:
    own, options, expected, said = CASES[case]
    settings, err = asked(own, *options)
    assert settings == expected
    assert said in err


WRONG = {
    "both": (["--greedy", "--temperature", "0.5"], "--greedy and --temperature 0.5 contradict"),
    "narrowing": (["--greedy", "--top-k", "5"], "top_k has no meaning when decoding greedily"),
    "range": (["--top-p", "2"], "top_p 2.0 is out of range"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_contradictions_are_told_before_anything_loads(
    run: Run, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    options, message = WRONG[case]
    monkeypatch.setattr(files, "from_pretrained", None)
    code, out, err = run("chat", *MODEL, *options)
    assert (code, out) == (2, "")
    assert message in err


def test_generate_and_python_are_greedy_where_nothing_asks_for_sampling(run: Run) -> None:
    code, out, err = run("generate", "Name a tree.", *MODEL, "--heads", "none", "-n", "8")
    assert (code, out) == (0, plain_text("Name a tree.") + "\n")
    assert "sampling" not in err
    engine = medusa_kit.load("debug-tiny", heads=None, device="cpu")
    result = engine.generate([{"role": "user", "content": "Name a tree."}], max_new_tokens=8)
    assert result.text == plain_text("Name a tree.")


def test_generate_samples_as_a_chat_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    load, original = medusa_kit.load, Engine.generate

    def with_config(model: str, **arguments: Any) -> Engine:
        engine = load(model, **arguments)
        engine.base.model.generation_config = GenerationConfig(**OWN)
        return engine

    def generate(self: Engine, prompt: Any, **options: Any) -> Any:
        seen.append(options)
        return original(self, prompt, **options)

    monkeypatch.setattr("medusa_kit.engine.load.load", with_config)
    monkeypatch.setattr(Engine, "generate", generate)
    code, _, err = run("generate", "Name a tree.", *MODEL, "--heads", "none", "-n", "4")
    assert code == 0, err
    assert (seen[-1]["temperature"], seen[-1]["top_p"]) == (0.6, 0.9)
    assert "sampling at temperature 0.6, top_p 0.9, seed 0 (the model's own)" in err


class Streaming(list[Any]):
    """One that was read to its end."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def compared(
    capsys: pytest.CaptureFixture[str], temperature: float,
    near_ties: int = 0, count: int = 32, acceptance: str = "exact", loop: int = 0,
) -> str:  # fmt: skip
    """What /compare says where plain decoding gives other tokens, or the same ones before a `loop`
    of so many."""

    def result(*token_ids: int) -> Any:
        stats = SimpleNamespace(
            decoding_tokens_per_second=10.0,
            lossy=acceptance == "typical",
            acceptance=acceptance,
            lossy_by=[acceptance],
            quantization=None,
            activations="float32",
            near_ties=near_ties,
        )
        return SimpleNamespace(token_ids=list(token_ids), stats=stats)

    def stream(prompt: list[int], **settings: Any) -> Streaming:
        assert settings["max_new_tokens"] == count
        return Streaming(result(*range(count - 1), count if loop else -1))

    engine = SimpleNamespace(conversation=lambda system: None, stream=stream, own_drafter="auto")
    chat = Chat(engine, {"max_new_tokens": count, "temperature": temperature}, None)
    ids, pace = [*range(count - 1), *[count] * (1 + loop)], Pace()
    pace._marks = [(2, 0.0), (count - 1, 1.0), (count + loop, 1.1)]
    chat.last = Answered([], result(*ids), {None: 3, "medusa": 3, "suffix": 2}, pace)
    chat.compare()
    return capsys.readouterr().err


def test_other_tokens_are_expected_of_near_ties_and_lossy_rules_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for temperature in (0.0, 0.7):
        assert "1.00 x as fast, OTHER TOKENS" in compared(capsys, temperature)
    assert "after a near-tie" in compared(capsys, 0.0, near_ties=1)
    lossy = compared(capsys, 0.7, acceptance="typical")
    assert "OTHER" not in lossy
    assert "other tokens, as typical acceptance allows; 25% of" in lossy
    assert "; LOSSY: typical" in lossy


def test_no_speed_up_is_claimed_of_a_short_answer(capsys: pytest.CaptureFixture[str]) -> None:
    said = compared(capsys, 0.0, count=31)
    assert said.startswith("31 tokens: too short to compare speeds, OTHER TOKENS")
    assert "as fast" not in said
    assert "25% of the answer was copied from earlier text" in said


def test_a_loop_is_no_speed_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Only what came before it is answered again, and timed."""
    plain = [(1, 10.0), (32, 12.0)]

    def marked(self: Pace, streaming: Any) -> int:
        self._marks = plain
        return 32

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Streaming, "__iter__", lambda self: iter([None]))
        patch.setattr(Pace, "note", marked)
        said = compared(capsys, 0.0, count=32, loop=60)
    rates = 29 / 1.0, 31 / 2.0
    assert (
        f"with drafting {rates[0]:.0f}, {rates[0] / rates[1]:.2f} x as fast before its loop" in said
    )
    assert "the same tokens" in said
    short = compared(capsys, 0.0, count=20, loop=60)
    assert short.startswith("20 tokens before its loop: too short to compare speeds")


def test_a_seed_gives_the_same_words_without_the_drafter(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["Name a tree.", "/compare"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, "/exit"))
    code, _, err = run("chat", *MODEL, "--heads", "untrained", "-n", "40", "--seed", "3",
                       "--temperature", "0.7")  # fmt: skip
    assert code == 0
    assert "the same tokens" in err

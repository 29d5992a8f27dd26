"""Where activations cannot be rounded, the error has the value, what was expected and a hint, and
comes before a base is loaded where that can be known by then. Commands and files take the option.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.debug_model import MODEL
from support.gguf.tiny_gguf import write_gguf
from support.kernels.compiled import level_as_tests_have_it
from support.kernels.rounded import PRECISIONS, base_of, engine_of, gguf_file, multiplies_integers
from support.small_engines import build_engine, random_heads, random_prompt
from support.tiny_models import tiny_base
from support.typed import typed_command

import medusa_kit
from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.engine import load as loading
from medusa_kit.errors import ConfigError
from medusa_kit.infer.cpu import activations as precisions
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.binding.kernels import ISA_SWITCH, MAX_ROWS, OFF_SWITCH
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.forest import Forest
from medusa_kit.tree.candidate_tree import CandidateTree

integers_only = pytest.mark.skipif(
    not multiplies_integers(), reason="no integers are multiplied here"
)
INT8 = ["--weights", "int8"]
WIDE = CandidateTree([(rank,) for rank in range(MAX_ROWS)])  # with its root one node too many
# Options beside the activations -> what was expected, and what was found.
KNOWN: dict[str, tuple[dict[str, Any], str, str]] = {
    "dtype": ({"dtype": "bfloat16", "weights": "checkpoint"}, "dtype float32", "it is bfloat16"),
    "attention": ({"attention": "sdpa"}, "steps in C++", "attention 'sdpa' is run by torch"),
    "fixed shapes": ({"fixed_shapes": "always"}, "steps in C++", "fixed_shapes 'always' is run"),
    "floats": ({"weights": "checkpoint"}, "weights of 4 to 8 bits", "'debug-tiny' are stored as"),
    "a tree": ({"tree": WIDE, "heads": "untrained"}, "at most 256 nodes", "one of 257 nodes"),
}


class Loaded(Exception):
    """A base was loaded."""


@pytest.fixture
def no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> BaseModel:
        raise Loaded

    monkeypatch.setattr(loading, "base_for_decoding", load)
    monkeypatch.setattr(loading, "load_base_model", load)


@pytest.fixture
def other_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    def choose(switch: str, value: str) -> None:
        if switch == ISA_SWITCH:
            level_as_tests_have_it(monkeypatch, value)
        monkeypatch.setenv(switch, value)
        kernels.load_library.cache_clear()

    yield choose
    monkeypatch.undo()
    kernels.load_library.cache_clear()


@pytest.mark.parametrize("activations", PRECISIONS)
@pytest.mark.parametrize("case", KNOWN)
def test_what_is_told_before_a_base_is_loaded(no_base: None, case: str, activations: Any) -> None:
    options, expected, found = KNOWN[case]
    if case == "a tree" and not multiplies_integers():
        pytest.skip("something else is told first")
    given = {"heads": None, "weights": "int8", **options}
    with pytest.raises(ConfigError) as raised:
        medusa_kit.load("debug-tiny", activations=activations, **given)
    assert f"activations {activations} need" in raised.value.message
    assert expected in raised.value.message
    assert found in raised.value.message
    assert "use --activations float32" in str(raised.value.hint)
    with pytest.raises(Loaded):
        medusa_kit.load("debug-tiny", activations="float32", **given)


def test_a_gpu_is_told_before_a_base_is_loaded(
    no_base: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precisions, "pick_device", lambda name: torch.device("cuda"))
    with pytest.raises(ConfigError, match="int16 need a CPU; the device is cuda"):
        medusa_kit.load("debug-tiny", heads=None, activations="int16")


def test_an_unknown_word(no_base: None) -> None:
    with pytest.raises(ConfigError, match="activations 'int61' is unknown") as raised:
        medusa_kit.load("debug-tiny", activations="int61")
    assert "did you mean int16" in str(raised.value.hint)


def test_floats_in_a_file(no_base: None, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "floats.gguf", kind="F16")
    with pytest.raises(ConfigError, match=r"floats\.gguf' are stored as floats"):
        medusa_kit.load(str(path), heads=None, activations="int16")


@pytest.mark.parametrize(
    ("switch", "value", "message"),
    [(OFF_SWITCH, "0", "MEDUSA_KIT_NATIVE is 0"), (ISA_SWITCH, "plain", "plain does not")],
)
def test_kernels_that_multiply_no_integers(
    no_base: None, other_kernels: Any, switch: str, value: str, message: str
) -> None:
    """And an engine that is built around a base says so, too."""
    other_kernels(switch, value)
    if switch == ISA_SWITCH and kernels.load_library() is None:
        pytest.skip("the C++ kernels cannot be built here")
    given: dict[str, Any] = {"heads": None, "weights": "int8", "activations": "int16"}
    with pytest.raises(ConfigError, match=f"need kernels that multiply integers; {message}"):
        medusa_kit.load("debug-tiny", **given)
    with pytest.raises(ConfigError, match="int16 need") as raised:
        build_engine(base_of("llama"), weights="int8", activations="int16")
    assert "use --activations float32" in str(raised.value.hint)


@integers_only
@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        ("gpt2", {"weights": "int8"}, "steps in C\\+\\+; here they are run by torch, linear"),
        ("llama-tied", {}, "multiplied as integers; no weights of this model are stored"),
    ],
)
def test_what_only_loading_knows(base: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        build_engine(tiny_base(base), activations="int8", **options)
    assert "use --activations float32" in str(raised.value.hint)


@integers_only
def test_trees_that_one_call_does_not_take() -> None:
    """Drafters are refused before their first step, and a step never falls back to torch."""
    engine = engine_of("llama", "int16")
    prompt = random_prompt(9, 1)
    for name, options in (("suffix", {"num_nodes": MAX_ROWS + 1}),
                          ("prompt-lookup", {"num_tokens": MAX_ROWS}),
                          ("recycling", {"num_nodes": MAX_ROWS + 1}),
                          ("auto", {"max_nodes": MAX_ROWS + 1})):  # fmt: skip
        with pytest.raises(ConfigError, match="trees of at most 256 nodes; there is one of 257"):
            engine.generate(prompt, drafter=name, drafter_options=options, max_new_tokens=3)
        with engine.shared_batch() as shared, pytest.raises(ConfigError, match="at most 256"):
            shared.generate(prompt, drafter=name, drafter_options=options, max_new_tokens=3)
    assert isinstance(engine.verifier, NativeVerifier)
    cache = engine.verifier.new_cache(1, 2 * MAX_ROWS)
    many = Forest.chains([[5] * (MAX_ROWS + 1)], engine.base.device)
    with pytest.raises(ConfigError, match="at most 256"):
        engine.verifier.score(cache, many, [0])
    text = random_prompt(MAX_ROWS + 9, 2)  # longer prompts are read in pieces
    whole = engine.verifier.read_prompts(cache, [0], [text])[1]
    other = engine.verifier.new_cache(1, 2 * MAX_ROWS)
    engine.verifier.read_prompts(other, [0], [text[:100]])
    assert torch.equal(engine.verifier.read_prompts(other, [0], [text[100:]])[1], whole)
    most = {"drafter": "suffix", "drafter_options": {"num_nodes": MAX_ROWS}, "max_new_tokens": 3}
    expected = engine.generate(prompt, drafter="none", max_new_tokens=3).token_ids
    assert engine.generate(prompt, **most).token_ids == expected


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench", "verify"])
def test_commands_refuse_with_exit_code_2(
    no_base: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    run = typed_command(monkeypatch, capsys)
    monkeypatch.setattr(console.err, "width", 160)
    words = [command, *(["Hi."] if command == "generate" else []), *MODEL]
    code, out, err = run(*words, "--activations", "int8")
    assert (code, out) == (2, "")
    assert "stored as floats" in err
    assert "hint: use --activations float32" in err
    code, out, err = run(*words, "--activations", "int4")
    assert (code, out) == (2, "")
    assert "activations 'int4' is unknown" in err


@integers_only
def test_files_and_commands_take_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path / "cache"))
    model = gguf_file("Q8_0")
    said = {"model": str(model), "heads": "none", "activations": "int8", "drafter": "none"}
    file = tmp_path / "engine.yaml"
    file.write_text(yaml.safe_dump(said))
    engine = medusa_kit.load_config(file)
    assert "int8 activations" in engine.steps_run_by
    assert "int16 act" in medusa_kit.load_config(file, activations="int16").steps_run_by
    assert "activations" not in medusa_kit.load_config(file, activations="float32").steps_run_by
    expected = engine.generate("ab", max_new_tokens=12).text
    run = typed_command(monkeypatch, capsys)
    code, out, err = run("generate", "ab", "--config", str(file), "-n", "12")
    assert (code, out.strip()) == (0, expected.strip()), err


@integers_only
def test_heads_in_training_draft_beside_steps_in_c() -> None:
    """By torch, and the answer is the same."""
    engine = engine_of("llama", "int8")
    heads = random_heads(engine.base).requires_grad_(True)
    other = loading.with_heads(engine, heads)
    prompt = random_prompt(20, 2)
    expected = engine.generate(prompt, max_new_tokens=20).token_ids
    assert other.generate(prompt, drafter="medusa", max_new_tokens=20).token_ids == expected

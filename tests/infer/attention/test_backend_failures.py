"""Backends that turn out not to run here, or to compute something wrong: who goes on then."""

import subprocess
from typing import Any

import pytest
import torch
from support.attention_inputs import needs_triton, qkv, step_of
from support.small_engines import build_engine
from support.tiny_models import tiny_base

from medusa_kit.errors import CheckpointError, ConfigError
from medusa_kit.infer.attention import choice
from medusa_kit.infer.attention.backend import AttentionCall
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.attention.sdpa import explicit, tree_sdpa
from medusa_kit.infer.chains.choice import checked_verifier
from medusa_kit.infer.device.step import FixedStep


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that `auto` takes on the CPU, as on CUDA; a test may change the list."""
    names = ["triton", "flash", "sdpa"]
    named = AttentionChoice._candidates
    monkeypatch.setattr(
        AttentionChoice,
        "_candidates",
        lambda self, case: names if self.requested == "auto" else named(self, case),
    )
    return names


def forgets_the_prefix(call: AttentionCall) -> Any:
    seen = call.step.mask(None).clone()
    seen[:, :, 1:, 0] = False
    out = explicit(call.query_BHNE, call.key_BGLE, call.value_BGLE, seen, 1.0, None, None)
    return out.transpose(1, 2).contiguous()


def right_in_the_loop(call: AttentionCall) -> Any:
    attend = forgets_the_prefix if isinstance(call.step, FixedStep) else tree_sdpa
    return attend(call)


RIGHT_IN_THE_LOOP = choice.Backend(right_in_the_loop, lambda case: None)
WRONG = choice.Backend(forgets_the_prefix, lambda case: None)


# What Triton raises at its first launch where the machine lacks something.
FAILURES = [
    (subprocess.CalledProcessError(1, ["gcc", "/tmp/x/main.c"]), "exit status 1; .* Python.h"),
    (AssertionError("libcuda.so cannot found!\nmore"), "AssertionError: libcuda.so cannot found!$"),
    (FileNotFoundError(2, "No such file", "/sbin/ldconfig"), "FileNotFoundError: .*ldconfig"),
    (RuntimeError("0 active drivers ([]). There should only be one."), "0 active drivers"),
    (RuntimeError("Failed to find C compiler. Please specify"), "Failed to find C compiler"),
    (AssertionError(), "AssertionError: no reason given"),
]


class Broken:
    """In place of a kernel."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            raise self.error

        return launch


@needs_triton
@pytest.mark.parametrize(("error", "reason"), FAILURES, ids=lambda x: type(x).__name__)
def test_triton_that_cannot_be_launched(
    error: Exception, reason: str, many: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """`auto` goes on with the next backend and names the reason; asked for by name it is an error
    of ours."""
    from medusa_kit.infer.attention import triton_kernel

    monkeypatch.setattr(triton_kernel, "split_kernel", Broken(error))
    with pytest.raises(ConfigError, match="'triton' was asked for, but cannot be used") as caught:
        build_engine(tiny_base("llama"), attention="triton")
    assert caught.match(reason.removesuffix("$"))
    assert "attention auto" in str(caught.value.hint)
    attention = AttentionChoice("auto")
    step = step_of([7, 3])
    for _ in range(2):
        call = AttentionCall(*qkv(step, 2), step, 0.3)
        torch.testing.assert_close(attention.attend(call), tree_sdpa(call))
    report = attention.report()
    assert report["used"] == "flash"
    assert [line.split(": ")[0] for line in report["fallbacks"]] == ["triton"]
    assert report["fallbacks"][0].endswith("; flash instead")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(attention.ruled_out["triton"])
    assert capsys.readouterr().err.count("attention triton cannot run here") == 1


@needs_triton
def test_an_engine_loads_where_triton_cannot_run(
    many: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_kit.infer.attention import triton_kernel

    monkeypatch.setattr(triton_kernel, "split_kernel", Broken(FAILURES[0][0]))
    verifier, check = checked_verifier(tiny_base("llama"))
    assert check.relative_error < 1e-4
    assert verifier.attention.name == "flash"
    assert "Python.h" in verifier.attention.fallbacks[0]


def test_a_backend_that_fails_the_check_at_load(
    many: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto` leaves it to sdpa and says so; a name is an error; some faults are no backend's."""

    monkeypatch.setitem(choice.BACKENDS, "flash", WRONG)
    with pytest.raises(ConfigError, match=r"'flash' was .* logits on a tree are off by"):
        checked_verifier(tiny_base("llama"), "flash")
    many[:] = ["flash", "sdpa"]
    verifier, check = checked_verifier(tiny_base("llama"), "auto")
    assert check.relative_error < 1e-4
    report = verifier.attention.report()
    assert (report["asked"], report["used"]) == ("auto", "sdpa")
    assert "logits on a tree are off by" in report["fallbacks"][0]
    assert "attention flash failed the check at load" in capsys.readouterr().err
    base = tiny_base("llama")
    base.model.lm_head.weight.data[3, 3] = float("nan")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):  # no backend's fault
        checked_verifier(base, "flash")


def test_one_that_gives_no_numbers_leaves_it_to_another(
    many: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = choice.Backend(lambda call: right_in_the_loop(call) * float("nan"), lambda case: None)
    monkeypatch.setitem(choice.BACKENDS, "flash", broken)
    many[:] = ["flash", "sdpa"]
    verifier, _ = checked_verifier(tiny_base("llama"), "auto")
    assert verifier.attention.report()["used"] == "sdpa"


def test_one_that_fails_the_check_costs_no_other(
    many: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(choice.BACKENDS, "triton", WRONG)
    verifier, _ = checked_verifier(tiny_base("llama"))
    assert verifier.attention.name == "flash"
    assert verifier.attention.fallbacks[0].startswith("triton: trees cannot be verified")
    assert verifier.attention.fallbacks[0].endswith("; flash instead")


@pytest.mark.parametrize("fails_alone", [True, False])
def test_steps_of_fixed_shapes_outlive_a_backend(
    fails_alone: bool, many: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton that fails in them, or failed the check before, leaves them to sdpa."""
    monkeypatch.setitem(choice.BACKENDS, "triton", RIGHT_IN_THE_LOOP if fails_alone else WRONG)
    many[:] = ["triton", "sdpa"]
    engine = build_engine(tiny_base("llama"), fixed_shapes="always")
    assert engine.verifier.attention.name == "sdpa"
    stats = engine.generate([1, 5, 9], max_new_tokens=6).stats
    assert stats.steps_run_by == "torch, fixed shapes (sdpa)"
    assert stats.attention_fallbacks[0].startswith("triton: trees cannot be verified")
    assert len(stats.attention_fallbacks) == 1


def test_a_backend_asked_for_by_name_is_exchanged_for_no_other_in_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(choice.BACKENDS, "triton", RIGHT_IN_THE_LOOP)
    with pytest.raises(ConfigError, match=r"fixed_shapes 'always' was asked for, .* off by"):
        build_engine(tiny_base("llama"), attention="triton", fixed_shapes="always")

"""An answer that nobody reads on may be ended wherever Python looks for garbage: in any thread,
amid what holds any lock, under any mode of torch's. So its end looks at no model and computes
nothing.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import drafters, row_for
from support.small_engines import engine_with_heads, random_prompt, reusing
from support.tiny_models import tiny_base, tiny_model

import medusa_kit
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.base.model_state import ModelWatch
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.verifier import Verifier
from medusa_kit.locks import ATTRIBUTE as LOCK

PROMPT = random_prompt(20, 20)


class Held:
    """A lock that another thread holds for long."""

    def __enter__(self) -> None:
        raise AssertionError("waits for a lock")

    def __exit__(self, *_: object) -> None: ...


def hold_all(patch: pytest.MonkeyPatch, scheduler: Scheduler) -> None:
    base = scheduler.verifier.base
    for owner in (base, base.own_model):
        patch.setitem(vars(owner), LOCK, Held())
    patch.setattr(scheduler.thread, "_lock", Held())


def refuse(*_: object, **__: object) -> Any:
    raise AssertionError("looks at the model")


def begun(engine: Engine) -> Any:
    steps = engine.scheduler.run([row_for(engine, 20, 20)], drafters(engine)["none"])
    next(steps)
    return steps


def change(base: BaseModel) -> None:
    base.own_model.model.layers[0].mlp.down_proj.weight.data.mul_(-1.5)


@pytest.mark.parametrize("changed", [False, True])
def test_its_end_takes_no_lock_and_no_look(monkeypatch: pytest.MonkeyPatch, changed: bool) -> None:
    engine = engine_with_heads(tiny_base("llama-tied"))
    steps = begun(engine)
    if changed:
        change(engine.base)
    with monkeypatch.context() as patch, torch.device("meta"):
        hold_all(patch, engine.scheduler)
        patch.setattr(ModelWatch, "look", refuse)
        patch.setattr(Verifier, "read_prompts", refuse)
        patch.setattr(BaseModel, "hidden_and_logits", refuse)
        steps.close()
    assert len(engine.scheduler.idle) == 1
    other = tiny_model("llama-tied")
    if changed:
        change(wrap_model(other))
    expected = engine_with_heads(wrap_model(other)).generate(PROMPT, max_new_tokens=8)
    assert engine.generate(PROMPT, max_new_tokens=8).token_ids == expected.token_ids


def test_garbage_is_found_under_a_mode() -> None:
    """The model and its modules are out of reach too, and weak references to them dead."""
    engine = engine_with_heads(tiny_base("llama-tied"))
    circle: list[Any] = [engine, begun(engine)]
    circle.append(circle)
    del circle, engine
    with torch.device("meta"):
        gc.collect()  # what it raises is a warning, and so an error


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_an_answer_that_was_found_out_of_reach_gives_its_slot_back(family: str) -> None:
    engine = engine_with_heads(tiny_base(family))
    expected = engine.generate(PROMPT, max_new_tokens=8).token_ids
    engine.scheduler = reusing(engine.verifier)
    circle: list[Any] = [begun(engine)]
    circle.append(circle)
    del circle
    gc.collect()
    assert len(engine.scheduler.idle) == 1
    assert engine.generate(PROMPT, max_new_tokens=8).token_ids == expected


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_what_a_changed_model_read_is_not_gone_on_from(family: str) -> None:
    """Changed and changed back before anybody looks: no look can tell."""
    engine = engine_with_heads(tiny_base(family))
    engine.base.model.generation_config.eos_token_id = None
    weight = next(one for one in engine.base.model.parameters() if one.dim() == 2)
    expected = engine.generate(PROMPT, max_new_tokens=8, drafter="none").token_ids
    steps = begun(engine)
    before = weight.clone()
    weight.data.mul_(-3)
    next(steps)
    steps.close()
    weight.data.copy_(before)
    result = engine.generate([*PROMPT, *expected[:4]], max_new_tokens=4, drafter="none")
    assert result.token_ids == expected[4:]
    assert result.stats.cached_tokens == 0


def test_a_model_that_nobody_can_write_to_keeps_what_it_read() -> None:
    engine = engine_with_heads(tiny_base("gpt2"))
    vars(engine.base.own_model)["medusa_kit_watch"] = ModelWatch()
    begun(engine).close()
    result = engine.generate(PROMPT, max_new_tokens=4, drafter="none")
    assert result.stats.cached_tokens == len(PROMPT) - 1


def test_answers_left_so_share_a_batch_that_keeps_to_the_bound() -> None:
    engine = engine_with_heads(tiny_base("llama-tied"))
    engine.scheduler = reusing(engine.verifier)
    runs = [begun(engine) for _ in range(4)]
    for steps in runs[:3]:
        steps.close()
    assert not engine.scheduler.idle, "the fourth is in the same batch"
    runs[3].close()
    assert len(engine.scheduler.idle) == 1
    engine.scheduler.batches.kept_bytes = 1
    begun(engine).close()
    assert not engine.scheduler.idle


def test_an_answer_that_has_ended_is_kept_before_its_last_piece_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Past answers have a lock and a file."""
    engine = medusa_kit.load("debug-tiny", heads=None, device="cpu")
    store = tmp_path / "past"
    stream = engine.stream(
        "Hi", max_new_tokens=4, drafter="suffix", drafter_options={"store": str(store)}
    )
    while stream.result.finish_reason != "length":
        next(stream)
    assert store.exists()
    monkeypatch.setattr("medusa_kit.drafters.text.past_answers.PastAnswers.save", refuse)
    stream.close()

"""What an earlier request has read is not read again, and changes no token."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.callers import all_at_once
from support.small_engines import (
    build_engine,
    engine_with_heads,
    lively_chat_base,
    random_prompt,
    reusing,
)
from support.tiny_models import tiny_base, tiny_model
from transformers.pytorch_utils import Conv1D

import medusa_kit
from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.decode.batch import Batch
from medusa_kit.infer.decode.scheduler import Scheduler

in_cpp = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)
GROWING = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
FAMILIES = ["llama-tied", "gemma3", "gpt2", "gemma2"]  # the first two in C++, where it can be built


def plain(engine: Engine, prompt: list[int], tokens: int) -> list[int]:
    with torch.no_grad():
        out_1T = engine.base.model.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )  # fmt: skip
    return out_1T[0, len(prompt) :].tolist()


def engine_for(family: str) -> Engine:
    engine = engine_with_heads(tiny_base(family))
    engine.base.model.generation_config.eos_token_id = None
    return engine


@pytest.mark.parametrize("drafter", ["none", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_read_once(family: str, drafter: str) -> None:
    engine, text, before = engine_for(family), random_prompt(20, 1), list[int]()
    for turn in range(3):
        result = engine.generate(text, max_new_tokens=9, drafter=drafter)
        assert result.token_ids == plain(engine, text, 9)
        # The last token of the turn before has been read only where it was the middle of a path.
        kept = len(before)
        assert result.stats.cached_tokens in (kept, max(kept - 1, 0))
        before = [*text, *result.token_ids]
        text = [*before, *random_prompt(5, turn)]


@pytest.mark.parametrize("family", FAMILIES)
def test_another_end_is_read_from_where_texts_part(family: str) -> None:
    engine, shared = engine_for(family), random_prompt(15, 2)
    engine.generate([*shared, 3, 4, 5], max_new_tokens=8)
    result = engine.generate([*shared, 6, 7], max_new_tokens=8)
    assert result.stats.cached_tokens == 15
    assert result.token_ids == plain(engine, [*shared, 6, 7], 8)
    again = engine.generate([*shared, 6, 7], max_new_tokens=8)
    assert again.stats.cached_tokens == 16  # the last token of a prompt is always read
    assert again.token_ids == result.token_ids


def test_a_prefix_in_use_is_copied() -> None:
    """Rows of one call that begin alike: all but the first take what it has read."""
    engine, shared = engine_for("llama-tied"), random_prompt(30, 3)
    prompts = [[*shared, *random_prompt(4, seed)] for seed in range(4)]
    results = engine.generate(prompts, max_new_tokens=7, batch_size=2)
    assert [result.token_ids for result in results] == [plain(engine, p, 7) for p in prompts]
    assert results[0].stats.cached_tokens == 0
    assert min(result.stats.cached_tokens for result in results[2:]) >= 30


def test_off_reads_everything() -> None:
    engine = engine_for("llama-tied")
    engine.scheduler = Scheduler(engine.verifier)
    for _ in range(2):
        assert engine.generate(random_prompt(9, 1), max_new_tokens=5).stats.cached_tokens == 0


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda layer: layer.weight.mul_(-1.5),
    "by data": lambda layer: layer.weight.data.mul_(-1.5),
    "replaced": lambda layer: setattr(
        layer, "weight", torch.nn.Parameter(layer.weight.detach() * -1.5, requires_grad=False)
    ),
    "storage": lambda layer: setattr(layer.weight, "data", layer.weight.data * -1.5),
    "buffer": lambda layer: layer.register_buffer("unused", torch.ones(3)),
    "hook": lambda layer: layer.register_forward_hook(lambda module, inputs, out: out * 0.5),
    "forward": lambda layer: setattr(layer, "forward", lambda x: type(layer).forward(layer, -x)),
    "class": lambda layer: setattr(layer, "__class__", Negative),
    "setting": lambda layer: setattr(layer, "eps", 0.5),
}


class Negative(Conv1D):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


@pytest.mark.parametrize("fixed_shapes", ["never", "always"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_torch_runs_may_change_between_calls(change: str, fixed_shapes: Any) -> None:
    base = tiny_base("gpt2")
    base.model.generation_config.eos_token_id = None
    engine, prompt = build_engine(base, fixed_shapes=fixed_shapes), random_prompt(40, 4)
    for cached in (0, 39):
        assert engine.generate(prompt, max_new_tokens=6).stats.cached_tokens == cached
    block = engine.base.model.transformer.h[0]
    with torch.no_grad():
        CHANGES[change](block.ln_1 if change == "setting" else block.attn.c_attn)
    result = engine.generate(prompt, max_new_tokens=8)
    assert result.stats.cached_tokens == 0
    assert result.token_ids == plain(engine, prompt, 8)


def test_a_change_while_an_answer_streams_leaves_nothing_behind() -> None:
    engine = build_engine(lively_chat_base(), fixed_shapes="always")
    prompt = engine.encode("Tell me about rivers.")
    stream = engine.stream(prompt, max_new_tokens=40)
    next(stream)
    with torch.no_grad():
        engine.base.model.model.layers[0].mlp.up_proj.weight.data.mul_(-1.5)
    stream.close()
    assert engine.generate(prompt, max_new_tokens=4).stats.cached_tokens == 0


def test_layers_of_an_adapter_library_are_never_trusted() -> None:
    """They can be switched without a mark."""
    engine, prompt = engine_for("gpt2"), random_prompt(40, 4)
    adapter = type("LoraLinear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora"})
    engine.base.model.transformer.adapter = adapter(2, 2)
    for _ in range(2):
        assert engine.generate(prompt, max_new_tokens=4).stats.cached_tokens == 0


def test_weights_written_to_make_what_was_read_worthless_in_cpp() -> None:
    engine, prompt = engine_for("llama-tied"), random_prompt(12, 4)
    engine.generate(prompt, max_new_tokens=6)
    with torch.no_grad():
        engine.base.model.model.embed_tokens.weight.mul_(1.5)
    assert engine.generate(prompt, max_new_tokens=6).stats.cached_tokens == 0


@in_cpp
def test_conversations_that_alternate_keep_their_prefixes() -> None:
    """All of them begin with the same system prompt."""
    system = random_prompt(12, 9)
    engine = engine_for("llama-tied")
    texts = [[*system, *random_prompt(28, seed)] for seed in (1, 2)]
    for text in texts:
        engine.generate(text, max_new_tokens=4)
    lists = [[*system, *random_prompt(9, seed)] for seed in range(3, 7)]
    engine.generate(lists, max_new_tokens=4)
    for text in texts:
        assert engine.generate(text, max_new_tokens=4).stats.cached_tokens == 39


@in_cpp
def test_a_request_above_the_bound_leaves_what_is_kept() -> None:
    engine, text = engine_for("llama-tied"), random_prompt(40, 1)
    engine.generate(text, max_new_tokens=4)
    engine.scheduler.batches.kept_bytes = 2 * engine.scheduler.idle[0].cache.num_bytes
    engine.generate(
        [random_prompt(20, seed) for seed in range(12)], max_new_tokens=4, batch_size=12
    )
    assert engine.generate(text, max_new_tokens=4).stats.cached_tokens == 39


@in_cpp
def test_one_long_prompt_after_a_list_does_not_make_the_whole_list_longer() -> None:
    engine = engine_for("llama-tied")
    engine.generate([random_prompt(12, seed) for seed in range(8)], max_new_tokens=4, batch_size=8)
    engine.generate([*random_prompt(12, 0), *random_prompt(60, 9)], max_new_tokens=4)
    caches = [batch.cache for batch in engine.scheduler.idle]
    assert max(cache.num_positions for cache in caches if len(cache.lengths) == 8) < 40


@in_cpp
def test_a_stream_that_is_dropped_leaves_what_it_has_read() -> None:
    engine = medusa_kit.load("debug-tiny", device="cpu")
    prompt = engine.encode("Tell me about rivers.")
    stream = engine.stream(prompt, max_new_tokens=40)
    next(stream)
    next(stream)
    stream.close()
    assert engine.generate(prompt, max_new_tokens=4).stats.cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("shared", [False, True])
def test_what_a_model_read_by_an_earlier_rotary_table_is_read_anew(shared: bool) -> None:
    """A model that writes to that table itself is the same one after it."""
    model = tiny_model("llama", rope_parameters=GROWING)
    engine = build_engine(wrap_model(model, None, "growing"))
    engine.scheduler, prompt, read = reusing(engine.verifier), random_prompt(30, 1), list[int]()
    with engine.shared_batch(max_rows=1) if shared else nullcontext(engine) as answering:
        for writes in (False, False, True, False):
            if writes:
                model.model.rotary_emb.inv_freq.mul_(1.7)
            answer = answering.generate(prompt, max_new_tokens=6, drafter="none")
            assert answer.token_ids == plain(engine, prompt, 6)
            read.append(answer.stats.cached_tokens)
    assert read == [0, 29, 0, 29]


@in_cpp
def test_steps_do_not_look_at_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, looked, stepped = engine_for("llama-tied"), list[Batch](), list[Batch]()
    has_work, step = Batch.has_work.fget, Batch.step
    assert has_work is not None
    for seed in range(4):
        engine.generate(random_prompt(12, seed), max_new_tokens=4)
    assert len(engine.scheduler.idle) == 4
    looks = property(lambda batch: (looked.append(batch), has_work(batch))[1])
    monkeypatch.setattr(Batch, "has_work", looks)
    monkeypatch.setattr(Batch, "step", lambda batch: (stepped.append(batch), step(batch))[1])
    engine.generate(random_prompt(12, 9), max_new_tokens=9, drafter="none")
    assert set(looked) == set(stepped)


def test_threads_take_batches_of_their_own() -> None:
    engine = engine_for("llama-tied")
    prompts = [random_prompt(10 + seed, seed) for seed in range(4)]
    expected = [plain(engine, prompt, 12) for prompt in prompts]
    wrong: list[int] = []

    def ask(index: int) -> None:
        for _ in range(5):
            if engine.generate(prompts[index], max_new_tokens=12).token_ids != expected[index]:
                wrong.append(index)

    all_at_once(ask, 4)
    assert not wrong


@in_cpp
def test_what_is_kept_is_bounded() -> None:
    engine = engine_for("llama-tied")
    engine.generate(random_prompt(9, 1), max_new_tokens=5)
    (batch,) = engine.scheduler.idle
    engine.scheduler = reusing(engine.verifier, batch.cache.num_bytes - 1)
    for _ in range(2):
        assert engine.generate(random_prompt(9, 1), max_new_tokens=5).stats.cached_tokens == 0
    assert not engine.scheduler.idle
    engine.scheduler = reusing(engine.verifier, batch.cache.num_bytes * 3 // 2)
    for seed in (2, 3):  # the later one stays
        engine.generate(random_prompt(9, seed), max_new_tokens=5)
    assert len(engine.scheduler.idle) == 1
    assert engine.generate(random_prompt(9, 3), max_new_tokens=5).stats.cached_tokens == 8


@in_cpp
def test_a_batch_serves_more_rows_and_longer_ones_later() -> None:
    engine = engine_for("llama-tied")
    prompts = [random_prompt(n, n) for n in (6, 30, 11)]
    for some in ([prompts[0]], prompts, [prompts[1]]):
        results = engine.generate(some, max_new_tokens=10, batch_size=3)
        assert [r.token_ids for r in results] == [plain(engine, p, 10) for p in some]
    assert results[0].stats.cached_tokens == 29


@in_cpp
def test_near_ties_are_counted_where_a_prefix_was_reused() -> None:
    engine, prompt = engine_for("llama-tied"), random_prompt(12, 5)
    assert engine.generate(prompt, max_new_tokens=8).stats.near_ties == 0
    assert engine.generate(prompt, max_new_tokens=8).stats.near_ties == 0
    object.__setattr__(engine.check, "rounding_tolerance", 1e9)  # every margin is below this
    assert engine.generate(prompt, max_new_tokens=8).stats.near_ties == 8
    assert engine.generate(prompt, max_new_tokens=8, temperature=1.0).stats.near_ties is None
    penalised = engine.generate(prompt, max_new_tokens=8, repetition_penalty=1.2)
    assert penalised.stats.near_ties is None


def cached(engine: Engine, prompts: list[list[int]], tokens: int) -> list[int]:
    results = engine.generate(prompts, max_new_tokens=tokens, batch_size=4)
    assert [result.token_ids for result in results] == [plain(engine, p, tokens) for p in prompts]
    return [result.stats.cached_tokens for result in results]


@in_cpp
@pytest.mark.parametrize("tokens", [4, 40])
def test_questions_asked_again_find_their_slots(tokens: int) -> None:
    """Whatever the length of their answers, as many questions as there are slots."""
    engine = engine_for("llama-tied")
    prompts = [random_prompt(20 + seed, seed) for seed in range(4)]
    cached(engine, prompts, tokens)
    for _ in range(2):
        assert cached(engine, prompts, tokens) == [19, 20, 21, 22]


@in_cpp
def test_the_same_question_from_all_at_once_is_copied() -> None:
    engine, prompt = engine_for("llama-tied"), random_prompt(20, 1)
    cached(engine, [prompt], 4)
    assert cached(engine, [prompt] * 4, 4) == [19] * 4


@in_cpp
def test_a_new_question_leaves_the_slots_of_those_behind_it() -> None:
    engine = engine_for("llama-tied")
    prompts = [random_prompt(20, seed) for seed in range(4)]
    cached(engine, prompts, 4)
    assert cached(engine, [random_prompt(20, 9), *prompts[:3]], 4) == [0, 19, 19, 19]

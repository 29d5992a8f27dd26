"""One version at work: cases on stdin, seconds on stdout, a JSON line each.

Runs as a file, with PYTHONPATH naming the version, and imports nothing of this package.
"""

import importlib
import itertools
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

TREE = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)]
VOCABULARY = 16  # few, since heads and draws compute with them
STOP = ["no text has this"]
HEADS = {"drafter": "medusa"}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "heads": HEADS,
    "drawn": {**HEADS, "temperature": 0.8, "seed": 1},
    "stops": {**HEADS, "stop": STOP},
    "chosen": HEADS,  # draft tokens that gain are verified, by the clock
    "auto": {"drafter": "auto"},
}
CHOSEN = ("chosen", "auto")
# Of what a step consists, by where that is; a version has those that it has.
PARTS = {
    "draft": ("infer.decode.batch:drafts_of",),
    "forward": ("infer.device.verifier:CapturedVerifier.score",
                "infer.cpu.verifier:NativeVerifier.score"),
    "input of the forward": ("infer.device.captured:CapturedForward.send",),
    "read": ("infer.decode.batch:read_back",),
    "acceptance": ("infer.decode.group:Group.accept",),
    "compaction": ("infer.tree_cache:TreeCache.commit",),
    "emit": ("infer.decode.group:Group.go_on",),
    "stop strings": ("infer.decode.detokenize:StopStrings.push",),
    "learn": ("drafters.heads.source:HeadsSource.observe",
              "drafters.mixed.auto:AutoDrafter.observe"),
    "callers": ("infer.decode.batches:Batches._tell",),
    "other": ("infer.decode.batch:Batch.step",),
    "scheduler": ("infer.decode.batches:Batches.step",),
}  # fmt: skip


class Replayed:
    """A graph that has been replayed: in turn all guesses are right, and none is."""

    def __init__(self, forward: Any) -> None:
        forward.run()
        (hidden, logits, layers), argmax_T = forward._outputs
        logits = logits[:1].repeat(len(logits), 1)
        outputs = type(forward._outputs[0])(hidden[:1].expand_as(hidden).clone(), logits, layers)
        right_T = argmax_T[:1].expand_as(argmax_T).clone()
        kinds = [(outputs, right_T), (outputs, (right_T + 1) % VOCABULARY)]
        self._forward, self._kinds = forward, itertools.cycle(kinds)

    def replay(self) -> None:
        self._forward._outputs = next(self._kinds)


@contextmanager
def device_that_takes_none() -> Iterator[None]:
    from medusa_kit.infer.decode import read_back
    from medusa_kit.infer.device.verifier import CapturedVerifier

    made = CapturedVerifier._new_forward

    def new_forward(*given: Any) -> Any:
        forward = made(*given)
        forward.graph = Replayed(forward)
        return forward

    with (
        mock.patch.object(CapturedVerifier, "_new_forward", new_forward),
        mock.patch.object(read_back, "_is_on_host", return_value=False),
    ):
        yield


class Returning:
    """A library whose forward returns at once; all its other functions are the real ones."""

    def __init__(self, library: Any, decoder: Any) -> None:
        self._library, self._room = library, dict[tuple[int, int], Any]()
        self._vocab_size = decoder.packed.info["vocab_size"]
        self._wrong = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def mk_step(self, decoder: Any, step: Any, threads: int) -> None:
        import ctypes

        self._wrong ^= 1
        given = step._obj
        count, ranks = given.num_kept, given.num_likeliest
        hidden, logits, likeliest = self._made(count, ranks)
        ctypes.memmove(given.hidden_out, hidden.data_ptr(), hidden.nbytes)
        ctypes.memmove(given.logits, logits.data_ptr(), logits.nbytes)
        ctypes.memmove(given.likeliest, likeliest[self._wrong].data_ptr(), likeliest[0].nbytes)

    def _made(self, count: int, ranks: int) -> Any:
        import torch

        if (count, ranks) not in self._room:
            V = self._vocab_size
            ranked = torch.arange(RIGHT["cpu"], RIGHT["cpu"] + ranks + 1) % V
            both = torch.stack([ranked[:-1].repeat(count, 1), ranked[1:].repeat(count, 1)])
            hidden = HIDDEN["cpu"].repeat(count, 1)
            self._room[count, ranks] = hidden, torch.randn(1, V).repeat(count, 1), both
        return self._room[count, ranks]


RIGHT: dict[str, int] = {}  # the token that heads guess
HIDDEN: dict[str, Any] = {}  # after this hidden state


class Work:
    def __init__(self) -> None:
        self._engines: dict[tuple[str, bool], Any] = {}
        self.sleep = 0.0

    def figures(self, runner: str, drafter: str, rows: int, steps: int, parts: bool = False) -> Any:
        """Seconds of a step, or of each of its parts."""
        engine = self._engine(runner, drafter in CHOSEN)
        with device_that_takes_none() if runner == "device" else mock.patch.object(*self._cpu):
            self._answer(engine, drafter, rows, 3 * steps)  # what is made once, pages of memory too
            times = self._answer(engine, drafter, rows, 3 * steps)
            figures = {name: undisturbed(of) for name, of in times.items()}
            if not parts:
                return figures
            with parted(rows) as spent:
                self._answer(engine, drafter, rows, 3 * steps)
        return figures | undisturbed_parts(spent)

    def _engine(self, runner: str, chosen: bool) -> Any:
        if (runner, chosen) not in self._engines:
            self._engines[runner, chosen] = engine_of(
                fixed_shapes="always" if runner == "device" else "auto",
                guesses="paying" if chosen else "all",
            )
        engine = self._engines[runner, chosen]
        if runner == "cpu":
            self._stand_for(engine)
        return engine

    def _stand_for(self, engine: Any) -> None:
        import torch

        native = engine.verifier.native
        real = getattr(native._library, "_library", native._library)
        if "cpu" not in RIGHT:
            HIDDEN["cpu"] = torch.randn(1, engine.base.info.hidden_size)
            ids = engine.heads.guesser([0], HIDDEN["cpu"], None, 1)[0]
            RIGHT["cpu"] = int(ids.flatten()[0])
        self._cpu = native, "_library", Returning(real, native)

    def _answer(self, engine: Any, drafter: str, rows: int, tokens: int) -> dict[str, list[float]]:
        """Seconds of each step in which all rows took part, by the clock and of its thread."""
        batches, clock, own = engine.scheduler.batches, list[float](), list[float]()
        step, sleep = type(batches).step, self.sleep

        def timed(self: Any) -> bool:
            before = [batch.num_steps for batch in self.used]
            began, computed = time.perf_counter(), time.thread_time()
            was = step(self)
            if sleep:
                time.sleep(sleep)
            taken, computing = time.perf_counter() - began, time.thread_time() - computed
            after = [batch.num_steps for batch in self.used]
            if len(after) == 1 and after != before and self.used[0].num_running == rows:
                clock.append(taken)
                own.append(computing)
            return was

        prompts = [[1, 2, 3, row % VOCABULARY] for row in range(rows)]
        with mock.patch.object(type(batches), "step", timed):
            engine.generate(prompts, max_new_tokens=tokens, batch_size=rows, **ASKED[drafter])
        return {"clock": clock[1:], "computing": own[1:]}


def engine_of(**options: Any) -> Any:
    """An engine around a tiny Llama with untrained heads, which guess the base's own token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from medusa_kit.base.loading import load_base_model
    from medusa_kit.base.model import wrap_model
    from medusa_kit.engine.load import build_engine
    from medusa_kit.heads import MedusaHeads
    from medusa_kit.infer.cpu.binding import kernels
    from medusa_kit.settings.engine import EngineOptions
    from medusa_kit.tree.candidate_tree import CandidateTree

    torch.set_num_threads(1)
    kernels.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128,
                         num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
                         max_position_embeddings=4096)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    tokenizer = load_base_model("debug-tiny", device="cpu").tokenizer
    base = wrap_model(model, tokenizer, "host-time")
    type(base).stop_token_ids = frozenset()  # no answer ends early
    heads = MedusaHeads.for_base(base, num_heads=4).requires_grad_(False).eval()
    engine = build_engine(base, EngineOptions(heads=heads, **options))
    engine.use_tree(CandidateTree(TREE))
    return engine


def undisturbed(times: Sequence[float]) -> float:
    """The first decile of two steps in a row, of which one accepts all and one nothing: other
    programs only make steps longer."""
    pairs = [(a + b) / 2 for a, b in itertools.pairwise(times)]
    return statistics.quantiles(pairs, n=10)[0]


def undisturbed_parts(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The seconds of each part, of the quarter of pairs that took least."""
    pairs = sorted(itertools.pairwise(steps[1:-1]), key=lambda two: sum(map(total, two)))
    fast = [step for two in pairs[: max(len(pairs) // 4, 1)] for step in two]
    names = {name for step in fast for name in step}
    return {
        "wrapped": statistics.mean(map(total, fast)),
        **{name: statistics.mean(step.get(name, 0.0) for step in fast) for name in names},
    }


def total(step: dict[str, float]) -> float:
    return sum(step.values())


@contextmanager
def parted(rows: int) -> Iterator[list[dict[str, float]]]:
    """The seconds of each part of each step of so many rows, without those of parts within it."""
    steps, within = [defaultdict[str, float](float)], list[float]()

    def wrapped(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            within.append(0.0)
            began = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                taken = time.thread_time() - began
                steps[-1][part] += taken - within.pop()
                if within:
                    within[-1] += taken
                elif part == "scheduler":
                    (batch,) = given[0].used or (None,)
                    if batch is None or batch.num_running != rows or "forward" not in steps[-1]:
                        steps.pop()
                    steps.append(defaultdict(float))

        return timed

    with ExitStack() as ends:
        for part, places in PARTS.items():
            for place in places:
                module, _, name = place.partition(":")
                owner: Any = importlib.import_module(f"medusa_kit.{module}")
                *classes, last = name.split(".")
                for one in classes:
                    owner = getattr(owner, one, None)
                if (function := getattr(owner, last, None)) is not None:
                    ends.enter_context(mock.patch.object(owner, last, wrapped(part, function)))
        yield steps


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = Work()
    for line in sys.stdin:
        asked = json.loads(line)
        work.sleep = asked.pop("sleep", 0.0)
        answer = work.figures(**asked)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""Engines in several threads and in forked children say what one thread alone says."""

import copy
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from support.callers import Words, all_at_once, answers, engine_for, requests_of
from support.kernels.compiled import program_of
from support.small_engines import build_engine, engine_with_heads, random_prompt
from support.tiny_models import tiny_model

import medusa_kit
from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import wrap_model
from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.infer.cpu.binding import kernels, levels
from medusa_kit.infer.decode.node_choice.cost import StepCost

# How often each thread asks. Steps through torch take turns in Python, and are slow beside others.
ROUNDS = {"C++": 3, "torch": 1}


@pytest.fixture(params=["C++", "torch"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way steps go, both with several threads of their own."""
    if request.param == "torch":
        monkeypatch.setenv(kernels.OFF_SWITCH, "0")
        monkeypatch.setattr(kernels, "load_library", cache(lambda: None))
    elif kernels.load_library() is None:
        pytest.skip("the C++ kernels cannot be built on this machine")
    return request.param


def test_one_engine_called_by_several_threads(steps: str, many_threads: None) -> None:
    engine, requests = engine_for(steps), requests_of(8)
    expected = answers(engine, requests)
    rounds = ROUNDS[steps]
    found = all_at_once(lambda _: [answers(engine, requests) for _ in range(rounds)], 4)
    assert found == [[expected] * rounds] * 4


@pytest.mark.slow
def test_an_engine_for_each_thread(steps: str, many_threads: None) -> None:
    requests, rounds = requests_of(8), ROUNDS[steps]
    engines = [engine_for(steps, seed) for seed in range(3)]
    expected = [answers(engine, requests) for engine in engines]
    found = all_at_once(lambda n: [answers(engines[n], requests) for _ in range(rounds)], 3)
    assert found == [[one] * rounds for one in expected]


def test_engines_built_by_several_threads_around_one_model() -> None:
    """Windows are narrowed while trees are checked; who decodes meanwhile must not see it."""
    model = tiny_model("mistral-sliding")
    engine = build_engine(wrap_model(model, None, "sliding"))
    requests = [{**one, "drafter": "suffix"} for one in requests_of(6)]
    expected = answers(engine, requests)

    def work(number: int) -> list[list[list[int]]]:
        if number == 0:
            for _ in range(6):
                build_engine(wrap_model(model, None, "again"))
        return [answers(engine, requests) for _ in range(4)]

    assert all_at_once(work, 3) == [[expected] * 4] * 3


def test_plain_generate_in_another_thread_keeps_its_attention() -> None:
    """The model is the caller's, and a step of a tree hangs on it while it runs."""
    model = tiny_model("gpt2")
    engine = engine_with_heads(wrap_model(model, None, "gpt2"))
    ids = torch.tensor([random_prompt(9, 1)])
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    requests = requests_of(4)
    own = answers(engine, requests)

    def work(number: int) -> bool:
        if number:
            return [answers(engine, requests) for _ in range(3)] == [own] * 3
        found = [model.generate(ids, max_new_tokens=20, do_sample=False) for _ in range(6)]
        return all(torch.equal(one, expected) for one in found)

    assert all_at_once(work, 3) == [True] * 3


def test_custom_generate_in_several_threads() -> None:
    """Attention is exchanged for the length of a call: the last one gives it back."""
    model = tiny_model("llama")
    attention = model.config._attn_implementation
    by_heads = medusa_kit.custom_generate_with(drafter="recycling")
    inputs = [torch.tensor([random_prompt(4 + n, n)]) for n in range(4)]
    settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    expected = [model.generate(ids, **settings) for ids in inputs]

    def work(number: int) -> bool:
        entry = by_heads if number % 2 else None
        return all(
            torch.equal(model.generate(ids, custom_generate=entry, **settings), own)
            for _ in range(2)
            for ids, own in zip(inputs, expected, strict=True)
        )

    assert all_at_once(work, 4) == [True] * 4
    assert model.config._attn_implementation == attention


def test_an_open_stream_blocks_nobody(steps: str, many_threads: None) -> None:
    engine, request = engine_for(steps), {**requests_of(1)[0], "max_new_tokens": 8}
    engine.base.tokenizer = Words()
    expected, done = engine.generate(**request).token_ids, Event()
    idle = engine.stream(random_prompt(6, 5), drafter="medusa", max_new_tokens=20)
    next(idle)

    def work() -> None:
        if engine.generate(**request).token_ids == expected:
            done.set()

    thread = Thread(target=work)
    thread.start()
    thread.join(timeout=120)
    assert done.is_set()
    assert len(list(idle)) > 0


FORK = """
import os, sys, threading
sys.path[:0] = {paths!r}
import torch
from support.callers import answers, engine_for, requests_of
from medusa_kit.infer.cpu.binding import kernels

torch.set_num_threads(2)
kernels.WORK_OF_A_THREAD = 1

def try_it(steps):
    engine, requests = engine_for(steps), requests_of(3)
    expected = answers(engine, requests)
    torch.randn(1000, 1000).exp().sum()  # torch's own threads have been at work too
    stop = threading.Event()
    def keep_on():
        while not stop.is_set():
            answers(engine, requests)
    beside = threading.Thread(target=keep_on)
    beside.start()
    for _ in range(3):
        child = os.fork()
        if child == 0:
            right = answers(engine, requests) == expected and kernels.threads_for(10**9) == 2
            kernels.set_num_threads(1)
            right = right and answers(engine, requests) == expected
            right = right and kernels.threads_for(10**9) == 1
            torch.randn(1000, 1000).exp().sum()
            os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0, steps
        assert answers(engine, requests) == expected, steps
    stop.set()
    beside.join()

for steps in {ways!r}:
    os.environ[kernels.OFF_SWITCH] = "0" if steps == "torch" else "1"
    kernels.load_library.cache_clear()
    try_it(steps)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_answers() -> None:
    """While another thread of the parent decodes, whose locks and threads the child never sees;
    both ways of steps in one process, which takes seconds to begin."""
    here = Path(__file__).parent
    ways = ["torch", *(["C++"] if kernels.load_library() else [])]
    code = FORK.format(paths=[str(here), str(here.parent)], ways=ways)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        capture_output=True, text=True, timeout=480, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(kernels.load_library() is None, reason="the C++ kernels cannot be built")
def test_a_model_that_has_decoded_can_be_copied() -> None:
    engine = engine_for("C++")
    request = {**requests_of(1)[0], "drafter": "none"}
    expected = engine.generate(**request).token_ids
    twin = copy.deepcopy(engine.base.model)
    other = build_engine(wrap_model(twin, None, "twin"))
    assert other.generate(**request).token_ids == expected


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timer here")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_an_interrupted_answer_gives_its_locks_back(kind: type[BaseException]) -> None:
    """Signals reach the main thread at any place, also where it has just taken a lock."""
    engine, request = engine_with_heads(), requests_of(1)[0]
    expected = engine.generate(**request).token_ids
    going, interrupted = Event(), Event()
    going.set()

    def interrupt(*_: Any) -> None:
        interrupted.set()
        raise kind

    def keep_on() -> None:
        while going.is_set():
            engine.generate(**request)

    others = [Thread(target=keep_on, daemon=True) for _ in range(2)]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for other in others:
            other.start()
        for round_ in range(60):
            interrupted.clear()
            with suppress(kind):
                signal.setitimer(signal.ITIMER_REAL, 0.005 + 0.001 * (round_ % 7))
                # What a signal raises inside a destructor or a callback of the garbage collector
                # (hypothesis adds one) goes no further: not for ever, then.
                while not interrupted.is_set():
                    engine.generate(**request)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        going.clear()
    for other in others:
        other.join(timeout=60)
        assert not other.is_alive()
    assert engine.generate(**request).token_ids == expected


@pytest.mark.slow
def test_models_are_loaded_by_several_threads(tmp_path: Path) -> None:
    """transformers exchanges functions of torch's while it builds a model."""
    families = ("llama", "gpt2", "mistral", "qwen2")
    for number, family in enumerate(families):
        tiny_model(family, number).save_pretrained(tmp_path / family)
        byte_tokenizer().save_pretrained(tmp_path / family)

    def fingerprint(number: int) -> str:
        base = load_base_model(str(tmp_path / families[number % 4]), device="cpu")
        return base.info.fingerprint

    alone = [fingerprint(number) for number in range(4)]
    assert len(set(alone)) == 4
    found = all_at_once(lambda number: [fingerprint(number + n) for n in range(8)], 4)
    assert found == [[alone[(number + n) % 4] for n in range(8)] for number in range(4)]


def test_a_stream_is_closed_while_another_thread_reads_it() -> None:
    engine = engine_with_heads()
    engine.base.tokenizer = Words()
    engine.base.model.generation_config.eos_token_id = None
    for _ in range(10):
        streaming = engine.stream(random_prompt(6, 5), drafter="medusa", max_new_tokens=100)
        begun, pieces = Event(), []

        def read(streaming: Any = streaming, begun: Event = begun, pieces: Any = pieces) -> None:
            for piece in streaming:
                pieces.append(piece)
                begun.set()

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            assert begun.wait(60)
            streaming.close()
            reading.result(timeout=60)
        assert list(streaming) == []


def test_experience_is_recorded_while_others_read_it() -> None:
    """The means of steps are a dictionary that grows under those who fit a line through it."""
    cost, acceptance = StepCost(slope=0.1), AcceptanceEstimate()

    def work(number: int) -> None:
        for step in range(600):
            cost.record(1 + number * 600 + step, 1e-3)
            cost.seconds(5000)
            acceptance.record(("kind", step % 7), True)

    all_at_once(work, 4)
    assert acceptance.chance(("kind", 1), 0.5) > 0.9


TSAN = (
    "-fsanitize=thread",
    "-O0",
    "-g",
    "-std=c++17",
    "-pthread",
    "-ffp-contract=off",
    "-Wno-psabi",
)


def under_thread_sanitizer(*machine_flags: str) -> subprocess.CompletedProcess[str]:
    """The kernels' driver, compiled and run; skips where the compiler lacks ThreadSanitizer."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, headers = Path(__file__).with_name("kernel_threads.cpp"), levels.FOLDER
    try:
        program = program_of(source, [compiler, *TSAN, *machine_flags, f"-I{headers}"])
    except subprocess.CalledProcessError as error:
        if any(name in error.stderr for name in ("-ltsan", "libtsan", "unsupported")):
            pytest.skip("the compiler has no ThreadSanitizer")
        pytest.fail(error.stderr)
    ran = subprocess.run([program], capture_output=True, text=True, timeout=240, check=False)
    if "unexpected memory mapping" in ran.stderr and shutil.which("setarch"):
        ran = subprocess.run(
            ["setarch", "-R", program],
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    return ran


@pytest.mark.slow
def test_the_kernels_have_no_data_race() -> None:
    ran = under_thread_sanitizer()
    assert "WARNING: ThreadSanitizer" not in ran.stderr, ran.stderr[:4000]
    assert ran.returncode == 0, ran.stdout


@pytest.mark.stress
@pytest.mark.skipif("STRESS_REQUESTS" not in os.environ, reason="the long form only: make stress")
def test_the_kernels_of_this_processor_have_no_data_race() -> None:
    ran = under_thread_sanitizer("-march=native")
    assert "WARNING: ThreadSanitizer" not in ran.stderr, ran.stderr[:4000]
    assert ran.returncode == 0, ran.stdout

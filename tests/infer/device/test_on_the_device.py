"""Captured forwards on the stand-in for a CUDA device: what a step costs, and what a server needs.

The oracle is transformers' own generate on the host, or the loop there for draws.
"""

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import cuda_stand_in as stand_in
from support.cuda_stand_in import Device
from support.host_reads import plain_answers
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import CONTEXT, tiny_base, tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.scheduler import KEPT_SHARE
from medusa_kit.infer.device.captured import MAX_NODES
from medusa_kit.infer.device.verifier import SHARE_OF_CACHE, CapturedVerifier
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.memory import cache_bytes_per_token
from medusa_kit.tree.dynamic import DynamicTree

PROMPTS = [random_prompt(length, length) for length in (2, 19, 7)]
DRAFTERS = ["none", "medusa", "auto", "suffix", "recycling"]
DRAWN = {"temperature": 0.8, "seed": 3}
GROWN = DynamicTree(12, (1.0, 1.0, 1.0))
SEES_TEXT = DynamicTree(12, (1.0, 1.0, 1.0), smoothing=(5.0, 0.5))


@pytest.fixture(scope="module")
def cuda_stand_in() -> Iterator[Device]:
    """One for the module, since engines take seconds to build."""
    with stand_in.installed() as device:
        yield device


@pytest.fixture(scope="module")
def engines(cuda_stand_in: Device) -> dict[str, Engine]:
    """By the kind of their heads, for tests that may find it used; they set the tree."""
    return {kind: engine_there(kind=kind) for kind in ("medusa", "recurrent")}


@pytest.fixture
def engine(engines: dict[str, Engine]) -> Engine:
    engine = engines["medusa"]
    engine.use_tree(BUSHY)
    return engine


def engine_there(tree: Any = BUSHY, kind: str = "medusa", **options: Any) -> Engine:
    base = wrap_model(tiny_model("llama").to("cuda"))
    heads = random_heads(base, kind=kind)
    return build_engine(base, heads=heads.to("cuda"), tree=tree, **options)


def engine_here() -> Engine:
    return build_engine(tiny_base("llama"))


def verifier_of(engine: Engine) -> CapturedVerifier:
    assert isinstance(engine.verifier, CapturedVerifier)
    return engine.verifier


def waits_a_step(device: Device, engine: Engine, **options: Any) -> float:
    """Of a long answer against a short one, so that the prompt's and the request's do not count."""
    prompt = PROMPTS[1]
    for _ in range(3):  # captures what is needed, also where drafters learn from earlier answers
        engine.generate(prompt, max_new_tokens=14, **options)
    found = []
    for tokens in (2, 14):
        with device.counted() as counts:
            steps = engine.generate(prompt, max_new_tokens=tokens, **options).stats.num_steps
        waits = [one for one in counts.waits if "capture.py" not in one.where]  # of new shapes
        found.append((len(waits), steps))
    (short, fewer), (long, more) = found
    assert more > fewer
    return (long - short) / (more - fewer)


def test_logits_processed_by_a_nodes_own_text(engine: Engine) -> None:
    """Or sorted: each node is chosen when it is reached."""
    loose, here = verifier_of(engine).num_loose, engine_here()
    for sampling in ({"repetition_penalty": 1.3}, DRAWN | {"top_p": 0.9}):
        expected = here.generate(PROMPTS, max_new_tokens=8, drafter="none", **sampling)
        results = engine.generate(PROMPTS, max_new_tokens=8, drafter="medusa", **sampling)
        assert [one.token_ids for one in results] == [one.token_ids for one in expected]
        assert verifier_of(engine).num_loose == loose


@pytest.mark.parametrize(("drafter", "sampling"), [
    ("none", {}), ("medusa", {}), ("suffix", {}), ("recycling", {}),
    ("none", DRAWN), ("medusa", DRAWN | {"top_k": 8}), ("recycling", DRAWN),
])  # fmt: skip
def test_a_step_waits_once(
    cuda_stand_in: Device, engine: Engine, drafter: str, sampling: dict[str, Any]
) -> None:
    assert waits_a_step(cuda_stand_in, engine, drafter=drafter, **sampling) <= 1


@pytest.mark.parametrize(("tree", "kind", "most"), [
    (GROWN, "medusa", 2), (GROWN, "recurrent", 2), (SEES_TEXT, "medusa", 2),
    (SEES_TEXT, "recurrent", 1 + SEES_TEXT.depth + 1),  # once for each depth, to blend its guesses
])  # fmt: skip
def test_a_tree_that_grows_waits_for_its_guesses(
    cuda_stand_in: Device, engines: dict[str, Engine], tree: DynamicTree, kind: str, most: int
) -> None:
    engines[kind].use_tree(tree)
    assert waits_a_step(cuda_stand_in, engines[kind], drafter="medusa") <= most


@pytest.mark.slow
def test_a_server_captures_at_its_start_and_others_work_meanwhile(cuda_stand_in: Device) -> None:
    """Threads that copy to the device, as requests do that come in, are not refused."""
    engine, stop, failed = engine_there(), threading.Event(), list[Exception]()

    def copies() -> None:
        try:
            while not stop.is_set():
                torch.tensor([1, 2]).to("cuda").sum().item()
        except Exception as error:
            failed.append(error)

    beside = threading.Thread(target=copies)
    beside.start()
    try:
        batch = engine.shared_batch(max_rows=2)
    finally:
        stop.set()
        beside.join()
    assert not failed
    captured, generator = cuda_stand_in.counts.captures, random.Random(1)
    with batch:
        asked = [random_prompt(generator.randint(2, 30), seed) for seed in range(6)]
        drafters = [generator.choice(DRAFTERS) for _ in asked]
        answers = [
            batch.submit(prompt, max_new_tokens=12, drafter=drafter)
            for prompt, drafter in zip(asked, drafters, strict=True)
        ]
        tokens = [answer.result().token_ids for answer in answers]
    assert tokens == plain_answers("llama", asked, 12)
    assert cuda_stand_in.counts.captures == captured
    assert verifier_of(engine).num_loose == 0


def test_a_servers_cache_is_as_large_as_memory_allows(
    cuda_stand_in: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of it, also once the cache has rounded its slots up."""
    model = tiny_model("llama", max_position_embeddings=5000).to("cuda")
    verifier = verifier_of(build_engine(wrap_model(model)))
    per_token = cache_bytes_per_token(verifier.base)
    assert verifier.positions_for(4) > 5000
    for slots in (500, 1700, 2500, 5000, 8200):
        free = 4 * per_token * slots
        monkeypatch.setattr(cuda_stand_in.memory, "free", free)
        cache = verifier.new_cache(4, verifier.positions_for(4))
        share = 4 * per_token * cache.num_positions / free
        assert SHARE_OF_CACHE / 2 < share <= SHARE_OF_CACHE, (slots, cache.num_positions)


def test_conversations_are_kept_by_the_devices_size(cuda_stand_in: Device, engine: Engine) -> None:
    assert engine.scheduler.batches.kept_bytes == int(KEPT_SHARE * cuda_stand_in.memory.total)


def test_a_row_alone_is_not_padded_in_attention(cuda_stand_in: Device, engine: Engine) -> None:
    """Which takes operations in each layer."""
    verifier, operations = verifier_of(engine), []
    for num_rows in (1, 2):
        cache = verifier.new_cache(num_rows, 64)
        verifier.read_prompts(cache, range(num_rows), [PROMPTS[0]] * num_rows)
        nodes = Forest.chains([[5, 6, 7, 8]], verifier.base.device)
        with cuda_stand_in.counted() as counts, torch.inference_mode():
            verifier.score(cache, nodes, [0])
        operations += counts.operations_per_replay
    alone, beside_another = operations
    assert beside_another - alone >= 2 * verifier.base.info.num_layers


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_stand_in")
def test_a_large_tree_behind_a_short_text_is_captured() -> None:
    """The cache has room for it as it is padded."""
    engine = engine_there(DynamicTree(70, (1.0, 1.0, 1.0)))
    verifier = verifier_of(engine)
    room = CONTEXT - len(PROMPTS[1])
    result = engine.generate(PROMPTS[1], max_new_tokens=room, drafter="medusa")
    assert [result.token_ids] == plain_answers("llama", [PROMPTS[1]], room)
    results = engine.generate(PROMPTS, max_new_tokens=8, drafter="medusa", batch_size=2)
    assert [one.token_ids for one in results] == plain_answers("llama", PROMPTS, 8)
    assert verifier.num_captured > 0
    assert verifier.num_loose == 0


@pytest.mark.usefixtures("cuda_stand_in")
def test_answers_say_that_steps_had_too_many_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    num_rows = 1 + MAX_NODES // 60
    engine = engine_there(DynamicTree(60, (1.0, 1.0, 1.0)))
    asked = PROMPTS * (1 + num_rows // len(PROMPTS))
    results = engine.generate(
        asked[:num_rows], max_new_tokens=4, drafter="medusa", batch_size=num_rows
    )
    assert [one.token_ids for one in results] == plain_answers("llama", asked[:num_rows], 4)
    reason = f"more than {MAX_NODES} nodes in a step"
    assert results[0].stats.steps_run_by == f"torch (not captured: {reason})"
    assert capsys.readouterr().err.count(reason) == 1


def test_streams_of_several_threads_take_turns(cuda_stand_in: Device, engine: Engine) -> None:
    """Forwards of all batches share their memory."""
    verifier, replays = verifier_of(engine), cuda_stand_in.counts.replays
    scored, nodes = [], Forest.chains([[5, 6]], verifier.base.device)
    for _ in range(2):
        cache = verifier.new_cache(1, 64)
        verifier.read_prompts(cache, [0], [PROMPTS[0]])
        with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
            scored += [verifier.score(cache, nodes, [0]) for _ in range(2)]
    assert cuda_stand_in.counts.replays >= replays + 4
    first, *others = [one.logits_NV.cpu() for one in scored]
    assert all(torch.equal(first, other) for other in others)

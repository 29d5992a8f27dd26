"""The promise on a CUDA device; these skip themselves where there is none."""

import warnings
from typing import Any

import pytest
import torch
from support.attention_inputs import inputs_of
from support.small_engines import build_engine
from support.tiny_models import PROMISED, tiny_base, tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import DeviceMemoryError
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.attention.backend import AttentionCall, Case
from medusa_kit.infer.attention.choice import BACKENDS
from medusa_kit.infer.attention.sdpa import tree_sdpa
from medusa_kit.infer.attention.step import TreeStep
from medusa_kit.infer.device.captured import CapturedForward
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.forest import Forest
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
TREE = CandidateTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


@pytest.mark.parametrize("family", PROMISED)
def test_greedy_equals_transformers_on_cuda(family: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny_model(family).cuda()
    prompt = list(range(5, 17))
    ids = torch.tensor([prompt], device="cuda")
    out = tiny_model(family).cuda().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )  # fmt: skip
    engine = build_engine(wrap_model(model))
    engine.heads = MedusaHeads.for_base(engine.base, num_heads=3).requires_grad_(False)
    engine.use_tree(TREE)
    assert engine.generate(prompt, max_new_tokens=24).token_ids == out[0, len(prompt) :].tolist()


def test_same_seed_same_text_as_on_the_cpu() -> None:
    prompt = list(range(5, 17))
    texts = []
    for device in ("cpu", "cuda"):
        engine = build_engine(wrap_model(tiny_base("llama").model.to(device)), attention="sdpa")
        result = engine.generate(prompt, max_new_tokens=24, temperature=0.9, seed=4)
        texts.append(result.token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("fixed_shapes", ["auto", "never"])
def test_a_greedy_step_waits_once(fixed_shapes: str) -> None:
    """Counted by torch's own warnings, a long answer against a short one, captured or not."""
    engine = captured_engine("llama", fixed_shapes=fixed_shapes)

    def waits(tokens: int, rows: int) -> tuple[int, int]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                results = engine.generate(PROMPTS[:rows], max_new_tokens=tokens)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waited = [one for one in caught if "synchronizing CUDA operation" in str(one.message)]
        return len(waited), max(result.stats.num_steps for result in results)

    for rows in (1, 3):
        waits(24, rows)  # what is made once, captures among it
        waits(4, rows)
        (short, fewer), (long, more) = waits(4, rows), waits(24, rows)
        assert long - short <= more - fewer, (rows, short, fewer, long, more)


# Attention backends with their real kernels.


def on_gpu(lengths: list[int], nodes: int, dtype: torch.dtype, size: int, groups: int) -> list:
    """Query, keys and values, laid out as a model and the tree cache do, and the step."""
    parents = [-1, *(torch.randint(0, n, ()).item() for n in range(1, nodes))]
    B = len(lengths)
    step = TreeStep(lengths, *inputs_of([parents] * B, "cuda"))
    query = torch.randn(B, nodes, 8, size, device="cuda", dtype=dtype).transpose(1, 2)
    slots = torch.randn(2, B, groups, step.num_positions + 40, size, device="cuda", dtype=dtype)
    return [query, *slots[:, :, :, : step.num_positions].unbind(), step]


@pytest.mark.parametrize("lengths", [[700], [300, 300], [0, 5, 900], [0, 0]], ids=str)
@pytest.mark.parametrize("window", [None, 5, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["flash", "triton"])
def test_a_backend_equals_sdpa_on_cuda(
    name: str, dtype: torch.dtype, window: int | None, lengths: list[int]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    backend = BACKENDS[name]
    for nodes, size, groups, extra in [(1, 64, 8, ""), (26, 128, 2, ""), (70, 64, 4, "sinks"),
                                       (16, 64, 2, "softcap")]:  # fmt: skip
        softcap = 5.0 if extra == "softcap" else None
        sinks = torch.randn(8, device="cuda") if extra == "sinks" else None
        query, key, value, step = on_gpu(lengths, nodes, dtype, size, groups)
        call = AttentionCall(query, key, value, step, 0.1, window, softcap, sinks)
        if reason := backend.unsupported(Case.of(call)):
            if extra:
                continue
            pytest.skip(f"{name}: {reason}")
        out = backend.attend(call)
        wide = [x.double() for x in (query, key, value)]
        expected = tree_sdpa(AttentionCall(*wide, step, 0.1, window, softcap, sinks))
        tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
        assert out.dtype == dtype
        assert float((out.double() - expected).abs().max()) < tolerance, (nodes, size, extra)


def test_auto_takes_triton_for_trees_flash_where_all_is_seen_and_passes_the_check_at_load() -> None:
    pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")
    model = tiny_model("llama", hidden_size=64).to("cuda", torch.bfloat16)  # head size 16
    engine = build_engine(wrap_model(model), fixed_shapes="never")
    result = engine.generate(list(range(5, 17)), drafter="none", max_new_tokens=8)
    assert (result.stats.attention, result.stats.attention_fallbacks) == ("triton+flash", [])


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-sliding"])
def test_greedy_equals_transformers_through_triton(family: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")
    torch.backends.cuda.matmul.allow_tf32 = False
    prompt = list(range(5, 17))
    ids = torch.tensor([prompt], device="cuda")
    out = tiny_model(family).cuda().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )  # fmt: skip
    base = wrap_model(tiny_model(family).cuda())
    heads = MedusaHeads.for_base(base, num_heads=3).requires_grad_(False)
    engine = build_engine(base, heads=heads, tree=TREE, attention="triton")
    result = engine.generate(prompt, max_new_tokens=24)
    assert result.token_ids == out[0, len(prompt) :].tolist()
    assert result.stats.attention == "triton"


# Forwards of fixed shapes, captured in CUDA graphs.

PROMPTS = [list(range(5, 17)), list(range(40, 71)), [9, 8]]
FAMILIES = ["llama", "qwen3", "gemma3", "mistral-sliding", "gpt2"]


def captured_engine(family: str, kind: str = "medusa", **options: Any) -> Engine:
    torch.backends.cuda.matmul.allow_tf32 = False
    base = wrap_model(tiny_model(family).cuda())
    heads = MedusaHeads.for_base(base, num_heads=3, kind=kind).requires_grad_(False)
    return build_engine(base, heads=heads, tree=TREE, **options)


def answers_on_cuda(family: str, tokens: int) -> list[list[int]]:
    model, answers = tiny_model(family).cuda(), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def texts(engine: Engine, prompts: Any = PROMPTS, **options: Any) -> list[list[int]]:
    """Answers all of whose forwards over trees were captured ones."""
    results = engine.generate(prompts, max_new_tokens=24, **options)
    verifier = engine.verifier
    assert isinstance(verifier, CapturedVerifier), verifier.steps_run_by
    assert verifier.refused is None
    assert verifier.num_captured > 0
    assert verifier.num_loose == 0
    graphs = [one.graph for cache in verifier._caches for one in cache.forwards.values()]
    assert all(graph is not None for graph in graphs)
    ran = [result.stats.steps_run_by for result in results if result.stats.num_steps]
    assert all("in a CUDA graph" in by for by in ran), ran
    return [result.token_ids for result in results]


@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_equal_transformers(family: str, attention: str, kind: str) -> None:
    """A batch of three, each row alone, and the same once more over other KV caches."""
    engine = captured_engine(family, kind, attention=attention)
    expected = answers_on_cuda(family, 24)
    for _ in range(2):
        assert texts(engine) == expected
        assert texts(engine, batch_size=1) == expected
        assert texts(engine, drafter="none") == expected


@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_trees_of_any_origin_are_captured(family: str, kind: str) -> None:
    """Of `auto`, and grown anew at each step."""
    engine = captured_engine(family, kind)
    expected = answers_on_cuda(family, 24)
    for _ in range(2):
        assert texts(engine, drafter="auto") == expected
    engine.use_tree(DynamicTree(6, (1.0, 1.0, 1.0), 3, 3))
    assert texts(engine) == expected


@pytest.mark.parametrize("drafter", ["medusa", "auto", "none"])
def test_sampled_text_is_that_of_the_loop(drafter: str) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 4, "drafter": drafter}
    captured, loop = captured_engine("llama"), captured_engine("llama", fixed_shapes="never")
    results = loop.generate(PROMPTS, max_new_tokens=24, **sampling)
    assert texts(captured, **sampling) == [result.token_ids for result in results]


def test_a_shared_batch_is_captured() -> None:
    """Requests of several kinds join and leave it."""
    engine = captured_engine("llama")
    expected = answers_on_cuda("llama", 24)
    with engine.shared_batch(max_rows=4) as batch:
        kinds = [{}, {"drafter": "auto"}, {"drafter": "none"}]
        answers = [
            batch.submit(prompt, max_new_tokens=24, **options)
            for options in kinds
            for prompt in PROMPTS
        ]
        assert [answer.result().token_ids for answer in answers] == 3 * expected
    assert isinstance(engine.verifier, CapturedVerifier)
    assert engine.verifier.num_captured > 0
    assert engine.verifier.num_loose == 0


def test_a_captured_forward_waits_for_nothing() -> None:
    verifier = captured_engine("llama").verifier
    cache, nodes = verifier.new_cache(2, 300), Forest.chains([[5, 6, 7], [8]], torch.device("cuda"))
    with torch.inference_mode():
        verifier.read_prompts(cache, range(2), PROMPTS[:2])
        first = verifier.score(cache, nodes, range(2))
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = verifier.score(cache, nodes, range(2))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(first.logits_NV, again.logits_NV)
    assert isinstance(verifier, CapturedVerifier)
    assert (verifier.num_loose, len(cache.forwards)) == (0, 1)


@pytest.mark.parametrize("fault", ["an error", "a read", "a read nobody hears of"])
def test_a_capture_that_fails_leaves_a_working_loop(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = captured_engine("llama"), CapturedForward.run
    stream, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()

    def run(self: CapturedForward) -> None:
        plain(self)
        if not torch.cuda.is_current_stream_capturing():
            return
        if fault == "an error":
            raise RuntimeError("injected")
        try:
            self._tokens_T.tolist()  # not allowed in a capture, which is invalid from here on
        except RuntimeError:
            if fault == "a read":
                raise

    monkeypatch.setattr(CapturedForward, "run", run)
    expected = answers_on_cuda("llama", 24)
    results = engine.generate(PROMPTS, max_new_tokens=24)
    assert [result.token_ids for result in results] == expected
    verifier = engine.verifier
    assert isinstance(verifier, CapturedVerifier)
    assert verifier.refused
    assert verifier.num_loose > 0
    assert results[0].stats.steps_run_by == f"torch (not captured: {verifier.refused})"
    assert (torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()) == (stream, mode)
    torch.rand(3, device="cuda")  # the generator is not being recorded
    # Nor does anything else go to the graph's memory: another model is captured after it.
    monkeypatch.setattr(CapturedForward, "run", plain)
    assert texts(captured_engine("llama")) == expected


def test_a_compiled_forward_is_captured() -> None:
    engine = captured_engine("llama", compiled=True)
    assert texts(engine) == answers_on_cuda("llama", 24)
    assert engine.steps_run_by.startswith("torch.compile, fixed shapes in a CUDA graph")


def test_a_request_too_large_for_the_gpu_leaves_the_engine_alive() -> None:
    engine = captured_engine("llama")
    torch.cuda.empty_cache()
    share = torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share + 1e-4))
    try:
        with pytest.raises(DeviceMemoryError, match="nodes each"):
            engine.generate([PROMPTS[0]] * 4096, max_new_tokens=100, batch_size=4096)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.generate(PROMPTS[0], max_new_tokens=8).token_ids == answers_on_cuda("llama", 8)[0]

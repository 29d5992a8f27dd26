"""The decoding methods on tiny models: which answers agree, which methods cannot run, and why."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.small_engines import (
    build_engine,
    endless_base,
    engine_with_heads,
    lively_chat_base,
    random_prompt,
)
from support.tiny_models import CONTEXT, VOCAB, tiny_base, tiny_model

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.bench import peers
from medusa_kit.bench.bench import bench
from medusa_kit.bench.methods import check_room, named_drafters, not_paying, standard_methods
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.peers import assistant_for, named_peers
from medusa_kit.bench.report import ONE_NODE, BenchReport, MethodResult, Tally, known_by
from medusa_kit.cli.prompts import read_prompt_set
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.plain import PlainDrafter
from medusa_kit.engine.load import with_heads
from medusa_kit.errors import ConfigError, ContextLengthError
from medusa_kit.heads import MedusaHeads
from medusa_kit.settings.sampling import SamplingParams

# Of different lengths; the last fills the context, so that a batch with it must stop early.
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((9, 3, 6, CONTEXT - 4))]
TOKENS = 8


def measured(
    base: BaseModel | None = None, prompts: list[list[int]] = PROMPTS, **options: Any
) -> BenchReport:
    base = base or tiny_base("llama")
    oracle = Oracle(options.pop("oracle", None) or tiny_base("llama"))
    sampling = options.pop("sampling", None)
    batch_size = options.pop("batch_size", 1)
    methods = standard_methods(
        {"heads": engine_with_heads(base)}, oracle, TOKENS, sampling=sampling,
        batch_size=batch_size, **options,
    )  # fmt: skip
    sampled = sampling is not None and not sampling.greedy
    return bench(methods, prompts, TOKENS, batch_size=batch_size, sampled=sampled)


def not_run(report: BenchReport) -> dict[str, str]:
    return {r.name: r.not_run for r in report.results if r.not_run is not None}


def test_the_standard_methods_agree_on_a_tiny_model() -> None:
    base = tiny_base("llama")
    plain = build_engine(base)
    drafting = with_heads(plain, MedusaHeads.for_base(base, 2).requires_grad_(False))
    oracle = Oracle(tiny_base("llama"))
    assert len(standard_methods({"plain": plain}, oracle, 6)) == 3, "without heads nothing drafts"
    methods = standard_methods({"plain": plain, "ours": drafting, "two": drafting}, oracle, 6)
    assert [method.name for method in methods] == [
        "transformers generate", "transformers prompt lookup", "medusa-kit, plain decoding", "ours",
        "two"]  # fmt: skip
    report = bench(methods, [[5, 6, 7, 5, 6, 7], [40, 41]], 6)
    assert [result.total.identical for result in report.results] == [2] * 5
    lengths = [result.total.acceptance_length for result in report.results]
    assert lengths[:3] == [None, None, 1.0]
    assert all(length is not None and length >= 1.0 for length in lengths[3:])


def test_without_an_oracle_one_node_is_the_reference() -> None:
    base = tiny_base("llama")
    ours = with_heads(build_engine(base), MedusaHeads.for_base(base, 2).requires_grad_(False))
    methods = standard_methods({"ours": ours}, None, 6, drafters=["medusa"])
    assert [method.name for method in methods] == [ONE_NODE, "ours, medusa"]
    report = bench(methods, [[5, 6, 7, 5, 6, 7], [40, 41]], 6)
    assert [result.total.identical for result in report.results] == [2, 2]
    assert report.identical_to == ONE_NODE


class Talkative(PlainDrafter):
    """Plain steps, with something to say about them."""

    name = "suffix"
    notes = ("nothing was found", "twice")


def test_a_row_for_each_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(context: DraftContext, options: Any) -> PlainDrafter:
        return Talkative(context.device)

    monkeypatch.setattr("medusa_kit.drafters.text.suffix.build", build)
    base, oracle = tiny_base("llama"), Oracle(tiny_base("llama"))
    plain = build_engine(base)
    heads = with_heads(plain, MedusaHeads.for_base(base, 2).requires_grad_(False))
    engines = {"medusa-kit": heads, "two": heads}

    def ours(engines: Any, drafters: Any = ()) -> list[str]:
        methods = standard_methods(engines, oracle, 6, peers=[], drafters=drafters)
        return [method.name for method in methods][2:]

    assert ours(engines, ["medusa", "suffix", "none"]) == [
        "medusa-kit, medusa", "two, medusa", "medusa-kit, suffix"]  # fmt: skip
    assert ours({"medusa-kit": plain}, ["none"]) == []
    plain.drafter = heads.drafter = "suffix"
    assert ours({"medusa-kit": plain}) == ours(engines) == ["medusa-kit, suffix"]

    methods = standard_methods(engines, oracle, 6, peers=[], drafters=["medusa", "suffix"])
    report = bench(methods, [[5, 6, 7], [40, 41]], 6)
    assert [result.total.identical for result in report.results] == [2] * 5
    notes = [method["drafter_notes"] for method in report.to_json()["methods"]]
    assert notes == [[], [], [], [], ["nothing was found", "twice"]]


def test_what_comes_after_the_first_step_is_timed_for_everybody() -> None:
    """Three prompts in a batch and one alone, none of which stops early: all but one token each."""
    base, oracle = endless_base(VOCAB), endless_base(VOCAB)
    report = measured(base, oracle=oracle, batch_size=3, prompts=PROMPTS[:1] * 4)
    for result in report.ran:
        total = result.total
        assert (total.tokens, total.decoding_tokens) == (4 * TOKENS, 4 * (TOKENS - 1))
        assert 0 < total.decoding_seconds < total.seconds
    assert len(report.ran) == 3
    lookup = measured(base, oracle=oracle, prompts=[[5, 6, 7, 5, 6, 7]]).results[1].total
    assert 0 < lookup.decoding_tokens <= TOKENS - 1, "its first step may bring several"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_batches_agree_with_padded_transformers(family: str) -> None:
    report = measured(tiny_base(family), oracle=tiny_base(family), batch_size=3)
    assert not_run(report) == {
        "transformers prompt lookup": "transformers' prompt lookup takes one prompt at a time"
    }
    assert [result.total.identical for result in report.ran] == [4, 4, 4]
    tokens = {result.total.tokens for result in report.ran}
    assert len(tokens) == 1
    assert tokens.pop() <= 3 * TOKENS + 4, "the last prompt leaves room for four"


def test_an_answer_of_a_padded_batch_ends_with_its_own_stop_token() -> None:
    base = endless_base(12)
    oracle = Oracle(base)
    (free, _), _ = oracle.generate_batch([[3, 4, 5], [6]], 12)
    base.model.generation_config.eos_token_id = free[4]
    (cut, other), _ = oracle.generate_batch([[3, 4, 5], [6]], 12)
    assert cut == free[: free.index(free[4]) + 1]
    assert free[4] not in other[:-1]


def test_sampling_is_seeded_and_compared_among_ours() -> None:
    report = measured(sampling=SamplingParams(1.5, seed=4), batch_size=2)
    assert [result.total.identical for result in report.ran] == [None, 4, 4]
    assert report.identical_to == "medusa-kit, plain decoding"
    oracle = Oracle(tiny_base("llama"))
    before = torch.get_rng_state()
    draws = [oracle.generate_batch(PROMPTS[:2], TOKENS, temperature=1.5, seed=seed)[0]
             for seed in (4, 4, 5)]  # fmt: skip
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(before, torch.get_rng_state()), "the caller's numbers are left alone"


def test_a_tempered_draw_may_be_any_token() -> None:
    """Top-k is 50 by default in transformers; here there are 96 tokens."""
    oracle = Oracle(tiny_base("llama"))
    (logits_V,) = oracle.logits([5, 6, 7])[None]
    unlikely = set(logits_V.argsort(descending=True)[50:].tolist())
    (first,) = zip(*oracle.generate_batch([[5, 6, 7]] * 64, 1, temperature=50.0)[0], strict=True)
    assert unlikely & set(first)


def test_assisted_generation_with_the_same_and_another_vocabulary() -> None:
    same = measured(peers=["assisted"], assistant=tiny_base("llama", seed=1), prompts=PROMPTS[:2])
    assert same.results[1].name == "transformers assisted (tiny-llama)"
    assert [result.total.identical for result in same.results] == [2] * 4
    other = measured(peers=["assisted"], assistant=endless_base(40), prompts=PROMPTS[:1])
    assert list(not_run(other).values()) == [
        "the vocabularies differ, and a model has no tokenizer"
    ]


def test_universal_assisted_generation_goes_by_the_tokenizers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, assistant = lively_chat_base(), lively_chat_base()
    assistant.model.resize_token_embeddings(assistant.config.vocab_size + 8)
    given: dict[str, Any] = {}

    def generate(batch: Any, max_new_tokens: int, **options: Any) -> Any:
        given.update(options)
        return [[1]], 1.0

    oracle = Oracle(base)
    monkeypatch.setattr(oracle, "generate_batch", generate)
    case = peers.PeerCase(oracle, 4, SamplingParams(), 1, assistant)
    peers.assisted(case).run([[5]])
    assert given["assistant_model"] is assistant.model
    assert given["tokenizer"] is base.tokenizer
    assert given["assistant_tokenizer"] is assistant.tokenizer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when dynamo is imported
def test_compiled_generation_compiles_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "COMPILE_BACKEND", "eager")  # traced, but no C++ compiler run
    # Each layer is traced, for each length of a prompt: one is enough.
    base, oracle = (
        wrap_model(tiny_model("llama", num_hidden_layers=1), None, "one layer") for _ in range(2)
    )
    report = measured(base, oracle=oracle, peers=["compiled"], prompts=PROMPTS[:2], batch_size=2)
    assert [result.total.identical for result in report.results] == [2] * 4
    oracle = tiny_base("llama")
    monkeypatch.setattr(oracle.model, "_valid_auto_compile_criteria", lambda *_: False)
    refused = measured(oracle=oracle, peers=["compiled"], prompts=PROMPTS[:1])
    assert not_run(refused) == {
        "transformers compiled": "transformers does not compile LlamaForCausalLM here"
    }


def test_flashspec_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashspec", None)
    report = measured(peers=["flashspec"], prompts=PROMPTS[:1])
    assert not_run(report) == {
        "flashspec (prompt lookup)": "flashspec is not installed (pip install flashspec)"
    }
    batched = measured(peers=["flashspec"], prompts=PROMPTS[:2], batch_size=2)
    assert "one length only" in not_run(batched)["flashspec (prompt lookup)"]


def test_flashspec_is_given_the_untouched_model_and_the_same_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A package with the interface of flashspec 0.3, whose engine answers 7 8 and then nothing."""
    made = SimpleNamespace(**{name: SimpleNamespace for name in
                              ("BanditConfig", "FlashSpecConfig", "SamplingConfig")})  # fmt: skip
    package, inner = ModuleType("flashspec"), ModuleType("flashspec.engine")
    seen: dict[str, Any] = {}

    class Engine:
        def __init__(self, config: Any, drafters: list[Any], target: Any) -> None:
            seen.update(config=config, drafters=drafters, target=target)

        def generate(self, ids_1T: torch.Tensor, **options: Any) -> Any:
            seen.update(options, ids=ids_1T.tolist())
            out = torch.tensor([[7, 8, -1, -1]])
            return SimpleNamespace(output_ids=out, n_tokens_generated=2)

    vars(package).update(vars(made), SpeculativeEngine=Engine)
    vars(inner).update(
        NgramDrafter=lambda: "lookup", HuggingFaceDrafter=None,
        TargetModel=lambda *place, model: model,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "flashspec", package)
    monkeypatch.setitem(sys.modules, "flashspec.engine", inner)
    oracle = Oracle(tiny_base("llama"))
    case = peers.PeerCase(oracle, TOKENS, SamplingParams(0.7, seed=3))
    assert peers.flashspec(case).run([PROMPTS[3]]).token_ids == [[7, 8]]
    assert (seen["target"], seen["drafters"]) == (oracle.base.model, ["lookup"])
    assert (seen["ids"], seen["max_new_tokens"]) == ([PROMPTS[3]], 4)
    assert seen["eos_token_ids"] == sorted(oracle.base.stop_token_ids)
    assert vars(seen["config"].sampling) == {"temperature": 0.7, "seed": 3}


def test_names_of_peers() -> None:
    assert named_peers(["transformers,prompt-lookup", "compiled", "compiled"]) == [
        "prompt-lookup", "compiled"]  # fmt: skip
    assert named_peers(["transformers"]) == []
    assert named_peers(["assisted, flashspec"], "small") == ["assisted", "flashspec"]


def test_names_of_drafters() -> None:
    assert named_drafters(["suffix, auto", "suffix"]) == ["suffix", "auto"]
    assert named_drafters(["draft-model"], "small") == ["draft-model"]
    for given, message in (("sufix", "did you mean suffix"), ("draft-model", "--draft-model")):
        with pytest.raises(ConfigError, match=message):
            named_drafters([given])


def test_the_assistant_is_the_draft_model_where_one_is_needed() -> None:
    assert assistant_for(["prompt-lookup, assisted"], None, "small") == "small"
    assert assistant_for(["assisted"], "other", "small") == "other"
    assert assistant_for(["prompt-lookup"], None, "small") is None


@pytest.mark.parametrize(
    ("given", "assistant", "message"),
    [
        ("compile", None, "peer 'compile' is unknown.*\n.*did you mean compiled"),
        ("assisted", None, "needs a smaller model.*\n.*--assistant"),
        ("prompt-lookup", "small", "assistant 'small' would not be used"),
    ],
)
def test_peers_that_make_no_sense(given: str, assistant: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_peers([given], assistant)


def test_a_prompt_without_room_is_refused_before_anything_runs() -> None:
    with pytest.raises(ContextLengthError, match="prompt 2 has 128 tokens"):
        check_room(tiny_base("llama"), [[1], [5] * CONTEXT])


def test_prompt_sets_keep_their_categories(tmp_path: Path) -> None:
    path = tmp_path / "spec_bench.jsonl"
    path.write_text(
        '{"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]}\n'
        '{"question_id": 0, "category": "math", "turns": ["Add."], "reference": ["3"]}\n'
        '{"prompt": "def f():"}\n{"prompt": "hi", "category": 3}\n'
    )
    rows = read_prompt_set(str(path), None)
    assert [(messages[0]["content"], category) for messages, category in rows] == [
        ("Compose.", "writing"), ("Add.", "math"), ("def f():", None), ("hi", None)]  # fmt: skip


def test_drafters_slower_than_one_node_are_named() -> None:
    def result(name: str, decoding_seconds: float, steps: int) -> MethodResult:
        total = Tally(answers=1, tokens=31, seconds=9.0, num_steps=steps, step_tokens=30)
        total.decoding_tokens, total.decoding_seconds = 30, decoding_seconds
        return MethodResult(name, total, **known_by(name))

    rows = [result("transformers generate", 8.0, 0), result(ONE_NODE, 3.0, 30),
            result("recycling", 4.0, 20), result("suffix", 2.0, 20),
            result("endpoint, a server", 5.0, 20)]  # fmt: skip
    assert not_paying(BenchReport(rows, 1, 31)) == [
        "recycling is not worth its cost here: 0.75 × the speed of plain decoding, at 1.50 tokens "
        "per step"
    ]
    assert not_paying(BenchReport([rows[0], *rows[2:]], 1, 31)) == []

"""One matrix of the promise: whatever runs a step, drafts, ends an answer and stands beside it, the
answer is plain decoding's.

A seeded sample has each pair of values; `make test CASES=all` has all combinations. The oracle in
float32 is transformers' own generate on an untouched second model; of draws, and within int16, it
is plain decoding with one node a step, by another engine.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import cuda_stand_in
from support.adapters import put_adapter
from support.drafter_options import NAMED
from support.kernels.rounded import multiplies_integers
from support.samples import Case, covering
from support.serving.grammars import PADDED, STOPS, OracleMask, tokenizer
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import CONTEXT, tiny_model
from transformers import LogitsProcessorList

from medusa_kit.base import adapters
from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_store import HeadsStore
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.settings.grammar import Grammar

DRAWN: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 5}
WORD = Grammar.regex("[a-z]{6,9} [0-9]{3,5}")
GIVEN: dict[str, dict[str, Any]] = {"seeded": DRAWN, "grammar": {"grammar": WORD}}
DIMENSIONS: dict[str, Sequence[Any]] = {
    "runner": ["torch", "C++", "fixed shapes"],
    "family": ["llama", "gemma3", "gpt2"],  # gemma3: windows; gpt2: no position past the last
    "drafter": NAMED,
    "ending": ["limit", "stop token", "stop string", "context"],
    "draws": ["greedy", "ties", "seeded", "grammar"],
    "rows": [1, 3],
    "precision": ["float32", "bfloat16 weights", "int16"],
    "beside": ["nothing", "prefix", "cancelled", "adapter"],
}
TOKENS = 20
ADAPTED = random_prompt(9, 8, 256)  # the prompt of a request with an adapter


def fits(case: Case) -> bool:
    if case["precision"] == "int16" and not (case["runner"] == "C++" and multiplies_integers()):
        return False
    if case["beside"] == "adapter" and (case["runner"] == "C++" or case["family"] == "gpt2"):
        return False  # packed weights take none; its layers have no names that adapters know
    if case["runner"] == "C++":
        return case["family"] != "gpt2" and kernels.load_library() is not None
    # An engine on the device takes seconds. Windows are in tests/infer/cuda_stand_in/; what
    # precisions change is packed weights.
    few = case["family"] != "gemma3" and case["precision"] == "float32"
    return case["runner"] != "fixed shapes" or few


# Those on the device come last: it stays in from then on.
CASES = sorted(covering(DIMENSIONS, fits), key=lambda case: case["runner"] == "fixed shapes")


def model_of(family: str, precision: str, ties: bool) -> Any:
    """With exact ties each token but a few has a twin, whose logit is the same. Weights that
    bfloat16 can hold are packed in fewer bytes, and computed with in float32."""
    changes: dict[str, Any] = {"vocab_size": PADDED}
    if family != "gpt2":  # sizes that C++ takes, and rounds
        changes |= {"head_dim": 16, "intermediate_size": 64 if precision == "int16" else 48}
    model = tiny_model(family, **changes)
    if precision == "bfloat16 weights":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    if ties:
        weight_VD = model.get_output_embeddings().weight.data
        weight_VD[1::2] = weight_VD[::2]
    return model


@cache
def engine_of(runner: str, family: str, precision: str, ties: bool, oracle: bool = False) -> Engine:
    """`oracle`: another one, that nothing is asked of but by `plain`."""
    device = "cuda" if runner == "fixed shapes" else "cpu"
    model, twin = (model_of(family, precision, ties).to(device) for _ in range(2))
    base = wrap_model(model, tokenizer(), family)
    options: dict[str, Any] = {"attention": "sdpa"} if runner == "torch" else {}
    if precision == "int16":
        options |= {"weights": "int8", "activations": "int16"}
    heads = random_heads(base, kind="hydra" if family == "gemma3" else "medusa").to(device)
    engine = build_engine(base, heads=heads, tree=BUSHY, **options)
    engine.draft_model = wrap_model(twin, tokenizer(), "the same")  # long drafts are right
    ran = "torch, fixed shapes" if runner == "fixed shapes" else runner
    assert engine.steps_run_by.startswith(ran), engine.steps_run_by
    return engine


_untouched = cache(model_of)


@cache
def plain(family: str, precision: str, draws: str, prompt: tuple[int, ...]) -> list[int]:
    """The answer that the tokenizer's own stop tokens, the context or TOKENS end."""
    room = min(TOKENS, CONTEXT - len(prompt))
    if precision == "int16" or draws == "seeded":
        runner = "C++" if precision == "int16" else "torch"
        engine = engine_of(runner, family, precision, draws == "ties", oracle=True)
        engine.base.model.generation_config.eos_token_id = STOPS
        given = GIVEN.get(draws, {})
        found = engine.generate(list(prompt), drafter="none", max_new_tokens=room, **given)
        return found.token_ids
    model, ids = _untouched(family, precision, draws == "ties"), torch.tensor([prompt])
    model.generation_config.eos_token_id = STOPS
    masks = [OracleMask(WORD, len(prompt))] if draws == "grammar" else []
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, do_sample=False,
        logits_processor=LogitsProcessorList(masks),
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def prompts_of(case: Case) -> list[list[int]]:
    """One repeats itself, so that copies are right now and then; or it ends near the context's."""
    first = random_prompt(7, 1, 256) * 4
    if case["ending"] == "context":
        first = random_prompt(CONTEXT - 6, 3, 256)
    return [first, random_prompt(5, 2, 256), random_prompt(19, 4, 256)][: case["rows"]]


def ended(case: Case, free: list[list[int]]) -> tuple[dict[str, Any], int | None, list[list[int]]]:
    """What to ask for, a token that is to stop answers, and what is then left of these."""
    first = free[0]
    if case["ending"] == "limit":
        limit = len(first) - 3
        return {"max_new_tokens": limit}, None, [answer[:limit] for answer in free]
    asked: dict[str, Any] = {"max_new_tokens": TOKENS}
    if case["ending"] == "stop token" and case["draws"] != "grammar":  # whose answers end by one
        stop = max(first, key=first.index)
        return asked, stop, [cut(answer, lambda ids: ids[-1] == stop) for answer in free]
    if case["ending"] == "stop string":
        asked["stop"] = text = text_that_comes_late(first)
        return asked, None, [cut(answer, lambda ids: text in written(ids)) for answer in free]
    return asked, None, free


def cut(answer: list[int], stopped: Any) -> list[int]:
    ends = [n for n in range(1, len(answer) + 1) if stopped(answer[:n])]
    return answer[: min(ends)] if ends else answer


def written(ids: list[int]) -> str:
    return tokenizer().decode(ids, skip_special_tokens=True)


def text_that_comes_late(answer: list[int]) -> str:
    texts = [written([token]) for token in answer]
    return next((text for n, text in reversed(list(enumerate(texts))) if text.isascii()
                 and text.isprintable() and text and text not in written(answer[:n])),
                "never")  # fmt: skip


@pytest.fixture(scope="module")
def device() -> Iterator[None]:
    with cuda_stand_in.installed():
        yield


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder with an adapter and its heads, model that it is merged into) by what models differ
    in."""

    @cache
    def made(family: str, precision: str, ties: bool) -> tuple[Path, Any]:
        root = tmp_path_factory.mktemp("adapters")
        put_adapter(root / "adapter", lambda: model_of(family, precision, ties), family, 1, 2)
        return root, adapters.merge_into(model_of(family, precision, ties), root / "adapter")

    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_the_answer_is_plain_decodings(case: Case, request: pytest.FixtureRequest) -> None:
    about = (case["family"], case["precision"])
    prompts = prompts_of(case)
    free = [plain(*about, case["draws"], tuple(prompt)) for prompt in prompts]
    asked, stop, expected = ended(case, free)
    if case["runner"] == "fixed shapes":
        request.getfixturevalue("device")
    ties = case["draws"] == "ties"
    engine = engine_of(case["runner"], *about, ties)
    name, options = case["drafter"]
    given = {"drafter": name, "drafter_options": options, **GIVEN.get(case["draws"], {})}
    config = engine.base.model.generation_config
    config.eos_token_id = STOPS
    if case["beside"] == "prefix":  # and drafters have seen where the answer would go on
        together = engine.generate(prompts, max_new_tokens=TOKENS, **given)
        assert [one.token_ids for one in together] == free
    config.eos_token_id = STOPS if stop is None else [*STOPS, stop]
    if case["beside"] == "cancelled":
        found = beside_a_cancelled_one(engine, prompts, {**given, **asked})
    elif case["beside"] == "adapter":
        adapted = request.getfixturevalue("adapted")(*about, ties)
        found = beside_an_adapter(engine, *adapted, prompts, {**given, **asked})
    else:
        found = engine.generate(prompts, **given, **asked)
    assert [one.token_ids for one in found] == expected
    last, text = expected[0][-1], asked.get("stop", "never")
    stopped = last in (*STOPS, stop) or text in written(expected[0])
    assert found[0].finish_reason == ("stop" if stopped else "length")


def beside_a_cancelled_one(
    engine: Engine, prompts: list[list[int]], given: dict[str, Any]
) -> list[Any]:
    with engine.shared_batch(max_rows=len(prompts) + 1) as batch:
        other = batch.submit(random_prompt(11, 9, 256), drafter="none", max_new_tokens=60)
        answers = [batch.submit(prompt, **given) for prompt in prompts]
        next(iter(other.submission))
        other.cancel()
        return [answer.result() for answer in answers]


def beside_an_adapter(
    engine: Engine, root: Path, merged: Any, prompts: list[list[int]], given: dict[str, Any]
) -> list[Any]:
    """Its request has the answer of a model that the adapter was merged into."""
    with (
        HeadsStore(engine, root) as store,
        engine.shared_batch(max_rows=len(prompts) + 1) as batch,
    ):
        heads = store.get("adapter")
        other = batch.submit(ADAPTED, drafter="medusa", heads=heads, max_new_tokens=TOKENS)
        answers = [batch.submit(prompt, **given) for prompt in prompts]
        ids = torch.tensor([ADAPTED])
        expected = merged.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
            eos_token_id=engine.base.model.generation_config.eos_token_id,
        )  # fmt: skip
        assert other.result().token_ids == expected[0, len(ADAPTED) :].tolist()
        return [answer.result() for answer in answers]


def test_drafts_are_right_now_and_then() -> None:
    """Else the matrix would pass with drafters that never guess right."""
    engine = engine_of("torch", "llama", "float32", False)
    engine.base.model.generation_config.eos_token_id = STOPS
    for name in ("draft-model", "auto"):
        result = engine.generate(random_prompt(5, 2, 256), drafter=name, max_new_tokens=TOKENS)
        assert result.stats.acceptance_length > 1.2, name

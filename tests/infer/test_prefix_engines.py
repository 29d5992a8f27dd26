"""Engines whose heads have a prefix layer: caches of their own, batches of their own beside rows
with other heads, plain decoding without the layer; text is plain decoding's everywhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import tiny_base

import medusa_kit
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_store import HeadsStore
from medusa_kit.engine.load import with_heads
from medusa_kit.heads import save_heads
from medusa_kit.infer.cpu import kernels
from medusa_kit.infer.verifier import Verifier
from medusa_kit.tree.candidate_tree import CandidateTree, save_tree

PROMPTS = [random_prompt(5 + 4 * seed, seed) for seed in range(4)]


def endless(family: str) -> BaseModel:
    base = tiny_base(family)
    base.model.generation_config.eos_token_id = None
    return base


@pytest.fixture(params=["llama-tied", "gpt2"])  # in C++, where it can be built; in torch
def plain(request: pytest.FixtureRequest) -> Engine:
    return build_engine(endless(request.param))


def prefixed(plain: Engine, kind: str = "hydra") -> Engine:
    heads = random_heads(plain.base, kind=kind, prefix_layers=1)
    return with_heads(plain, heads, tree=BUSHY)


def test_engines_share_what_they_can(plain: Engine) -> None:
    one, other = prefixed(plain), prefixed(plain, "medusa")
    verifiers = {plain.verifier, one.verifier, other.verifier}
    assert len(verifiers) == 3
    assert {verifier.without_prefix for verifier in verifiers} == {plain.verifier}
    assert with_heads(one, None).verifier is plain.verifier
    assert with_heads(one, one.heads).verifier is one.verifier
    layers = plain.base.info.num_layers
    assert len(plain.verifier.new_cache(1, 4).layers) == layers
    assert len(one.verifier.new_cache(1, 4).layers) == layers + 1


def test_what_one_has_read_is_not_taken_for_anothers(plain: Engine) -> None:
    """Keys of a prefix layer are of use to its own heads alone."""
    one, other, text = prefixed(plain), prefixed(plain, "medusa"), random_prompt(20, 9)
    expected = plain.generate(text, max_new_tokens=8).token_ids
    text += [*expected, 5]
    for engine in (one, other):
        engine.generate(text[:20], max_new_tokens=8)
        again = engine.generate(text, max_new_tokens=8)
        assert again.stats.cached_tokens >= 20
    fresh = prefixed(plain)
    assert fresh.generate(text, max_new_tokens=8).stats.cached_tokens == 0
    # Plain decoding runs without the layer, and so shares what the plain engine has read.
    assert one.generate(text, max_new_tokens=8, drafter="none").stats.cached_tokens >= 20


def test_weights_that_change_make_what_was_read_void(plain: Engine) -> None:
    engine, text = prefixed(plain), random_prompt(20, 9)
    assert engine.verifier.prefix is not None
    engine.generate(text, max_new_tokens=4)
    assert engine.generate(text, max_new_tokens=4).stats.cached_tokens == 19
    engine.verifier.prefix.norm.weight.data.mul_(1.0)  # leaves no version, and is not noticed
    engine.verifier.prefix.norm.weight.requires_grad_(False).mul_(1.5)
    assert engine.generate(text, max_new_tokens=4).stats.cached_tokens == 0


def test_the_layer_runs_for_heads_only(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = prefixed(plain), list[int]()
    new_cache: Callable[..., Any] = Verifier.new_cache

    def counted(self: Verifier, *args: Any) -> Any:
        made.append(self.num_layers - engine.base.info.num_layers)
        return new_cache(self, *args)

    monkeypatch.setattr(Verifier, "new_cache", counted)
    for drafter in ("none", "suffix", "medusa", "auto"):
        engine.generate(PROMPTS[0], max_new_tokens=6, drafter=drafter)
    assert made == [0, 0, 1, 1]


def test_statistics_name_it(plain: Engine) -> None:
    assert prefixed(plain).generate([5], max_new_tokens=3).stats.drafter == "hydra, prefix layer"


@pytest.mark.parametrize("own", [False, True], ids=["plain engine", "engine with such heads"])
def test_rows_with_other_prefix_layers_take_turns(plain: Engine, own: bool, tmp_path: Path) -> None:
    engine = prefixed(plain) if own else plain
    kinds = {"one": ("hydra", 1), "other": ("rooted", 1), "without": ("medusa", 0)}
    for seed, (name, (kind, layers)) in enumerate(kinds.items()):
        heads = random_heads(plain.base, 2 + seed, kind=kind, prefix_layers=layers)
        save_heads(heads, tmp_path / name)
        save_tree(BUSHY if seed else CandidateTree.chain(2), tmp_path / name / "tree.json", {})
    asks: list[tuple[str | None, dict[str, Any]]] = [
        ("one", {}), ("other", {}), ("without", {}), (None, {}), ("one", {"drafter": "suffix"}),
        ("other", {"drafter": "auto"}), ("one", {"temperature": 0.8, "seed": 3}),
    ]  # fmt: skip
    with HeadsStore(engine, tmp_path) as store, engine.shared_batch(max_rows=4) as shared:
        told = {status.name: status.kind for status in store.statuses()}
        assert told["other"] == "rooted, prefix layer"
        answers = [
            shared.submit(PROMPTS[number % 4], max_new_tokens=12, **options,
                          **({} if name is None else {"heads": store.get(name)}))
            for number, (name, options) in enumerate(asks)
        ]  # fmt: skip
        for number, ((_, options), answer) in enumerate(zip(asks, answers, strict=True)):
            alone = {**options, "drafter": "none"}
            expected = plain.generate(PROMPTS[number % 4], max_new_tokens=12, **alone)
            assert answer.result().token_ids == expected.token_ids
        names = [answer.result().stats.drafter for answer in answers]
        assert names[0] == names[6] == "hydra, prefix layer"


@pytest.mark.parametrize("native", ["1", "0"], ids=["in C++", "in torch"])
def test_load_reads_them_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: str
) -> None:
    monkeypatch.setenv(kernels.OFF_SWITCH, native)
    base = load_base_model("debug-tiny", device="cpu")
    save_heads(random_heads(base, 3, kind="hydra", prefix_layers=1), tmp_path)
    save_tree(BUSHY, tmp_path / "tree.json", {})
    engine = medusa_kit.load("debug-tiny", heads=tmp_path, device="cpu", guesses="all")
    assert engine.verifier.prefix is not None
    drafted = engine.generate("Hello there", max_new_tokens=20, drafter="medusa")
    plain = engine.generate("Hello there", max_new_tokens=20, drafter="none")
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.nodes_per_step == BUSHY.num_nodes
    talk = engine.conversation()
    first = talk.send("Hello there", max_new_tokens=10, drafter="medusa")
    assert first.token_ids == plain.token_ids[: len(first.token_ids)]
    assert talk.send("And then?", max_new_tokens=10, drafter="medusa").stats.cached_tokens > 0

"""A drafter inside the draft model: the same draft with fewer of the draft model's forwards."""

from typing import Any

import pytest
import torch
from support.small_engines import build_engine, decode_all, endless_base, random_prompt

from medusa_kit.base.model import BaseModel
from medusa_kit.drafters.draft_model import loading as draft_loading
from medusa_kit.drafters.draft_model.drafter import DraftModelDrafter
from medusa_kit.drafters.draft_model.staged import Inside
from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.tree_drafter import TreeDrafter
from medusa_kit.engine.engine import Engine
from medusa_kit.infer.decode.drafter import RequestText, State, StepResult
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.draft_tree import DraftTree


def slightly_other(vocab_size: int) -> BaseModel:
    """A draft that agrees with the base often but not always."""
    draft = endless_base(vocab_size)
    for layer in draft.model.model.layers[1:]:
        layer.mlp.down_proj.weight.data.mul_(0.85)
    return draft


class Copying(TreeDrafter):
    """Copies what followed the root where it last occurred in the text, three tokens at most."""

    name, num_nodes = "copying", 4
    rewinds = False
    greedy = True
    made = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        Copying.made += 1
        self.observed = 0

    def begin(self, request: RequestText) -> None:
        request.kept[self] = list(request.text)

    def guess(self, state: State) -> list[DraftTree]:
        trees = []
        for request in state.requests:
            tokens, root = request.text, request.root
            if not self.rewinds:  # its text only grows, as drafters may rely on
                known = request.kept[self]
                assert tokens[: len(known)] == known
            request.kept[self] = list(tokens)
            tree = DraftTree(root)
            places = [place for place, token in enumerate(tokens) if token == root]
            if places:
                tree.add_chain(tokens[places[-1] + 1 :][:3], 0.9)
            trees.append(tree)
        return trees

    def observe(self, step: StepResult) -> None:
        """The tokens are those of the greedy draft model after each accepted node, in all rows."""
        self.observed += 1
        if not self.greedy or len(step.trees) > 1:
            return
        (tree,) = step.trees
        for node, following in zip([0, *tree.path], tree.path, strict=False):
            assert int(tree.logits_NV[node].argmax()) == tree.tokens[following]


class CopyingOn(Copying):
    rewinds = True


class CopyingDraws(CopyingOn):
    greedy = False


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Few tokens: now and then a copy is right."""
    engine = build_engine(endless_base(8))
    engine.draft_model = slightly_other(8)
    return engine


def drafter_for(
    engine: Engine, options: dict[str, Any], sampling: SamplingParams, inside: Any = None
) -> DraftModelDrafter:
    """`inside`: makes the drafter inside, in place of what the options name."""
    context = DraftContext(
        engine.verifier, draft_model=engine.draft_model, memory=engine.memory, sampling=sampling
    )
    drafter = build_drafter("draft-model", context, options)
    assert isinstance(drafter, DraftModelDrafter)
    if inside is None:
        return drafter
    own = Inside(drafter.device, lambda: inside(drafter.device))
    return DraftModelDrafter(
        engine.base, drafter.verifier, drafter.options, drafter.vocabulary, own
    )


def decoded(
    engine: Engine, options: dict[str, Any], inside: Any = None, tokens: int = 40, rows: int = 1,
    **sampling: Any,
) -> Any:  # fmt: skip
    """(text, accepted depths of each row, drafter)."""
    params = SamplingParams(**sampling)
    drafter = drafter_for(engine, options, params, inside)
    prompts = [random_prompt(length, length, 8) * 2 for length in (6, 13, 9)][:rows]
    done = decode_all(engine, drafter, prompts, tokens, [params] * rows)
    return [row.token_ids for row in done], [row.depth_counts for row in done], drafter


@pytest.mark.parametrize(("kind", "most"), [(Copying, 0.9), (CopyingOn, 0.8)])
def test_the_same_drafts_with_fewer_forwards(
    engine: Engine, kind: type[Copying], most: float
) -> None:
    """Asked once a draft, or before each forward where it can take text back."""
    options = {"threshold": 0, "max_length": 6}
    plain = decoded(engine, options)
    before = Copying.made
    staged = decoded(engine, options, kind)
    assert staged[:2] == plain[:2]
    assert staged[2].num_forwards < most * plain[2].num_forwards
    assert Copying.made == before + 1
    assert (staged[2].inside.drafter.observed > 0) == (kind is CopyingOn)
    assert "its own drafter is copying" in staged[2].notes


def test_staged_draws_are_the_same_too(engine: Engine) -> None:
    options = {"threshold": 0, "max_length": 5}
    drawn: Any = {"tokens": 20, "rows": 3, "temperature": 0.3, "seed": 2}
    plain, staged = (
        decoded(engine, options, **drawn),
        decoded(engine, options, CopyingDraws, **drawn),
    )
    assert staged[:2] == plain[:2]
    assert staged[2].num_forwards <= plain[2].num_forwards


def test_a_draft_model_inside_a_draft_model_and_a_copier_inside_that(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_loading, "base_for_decoding", lambda name, **_: slightly_other(8))
    options, deep = {"threshold": 0, "max_length": 6}, {"threshold": 0, "max_length": 3}
    plain = decoded(engine, options)
    inner: Any = {"drafter": "draft-model", "draft_model": "debug-tiny", "options": deep}
    staged = decoded(engine, {**options, "staged": inner})
    assert staged[:2] == plain[:2]
    assert staged[2].num_forwards < 0.6 * plain[2].num_forwards
    inner["options"] = {**deep, "staged": {"drafter": "suffix"}}
    deeper = decoded(engine, {**options, "staged": inner})
    assert deeper[:2] == plain[:2]
    assert deeper[2].inside.drafter.num_forwards < staged[2].inside.drafter.num_forwards

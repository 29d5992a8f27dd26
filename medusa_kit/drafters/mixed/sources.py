"""The sources of `auto`: which there are, and their draft tokens as one tree for each request."""

from collections.abc import Mapping, Sequence
from typing import Any

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.mixed.under_grammar import under_grammar
from medusa_kit.drafters.native.mtp_layers import layers_or_error, num_layers
from medusa_kit.drafters.tree_drafter import TreeDrafter, weighed
from medusa_kit.errors import CheckpointError
from medusa_kit.infer.decode.drafter import State, StepResult
from medusa_kit.tree.draft_tree import DraftTree

ACCEPTANCE = "acceptance of draft tokens"  # under which an engine keeps its estimate


def merged(
    sources: Sequence[TreeDrafter], state: State, acceptance: AcceptanceEstimate
) -> list[DraftTree]:
    """One tree for each request with the draft tokens of all sources, each with its kind's chance
    so far, and with what a grammar forces."""
    result = [DraftTree(root) for root in state.roots_B]
    for source in sources:
        trees = [weighed(tree, acceptance) for tree in source.guess(state)]
        result = together(result, trees)
    masks = [None if sampler is None else sampler.mask for sampler in state.samplers]
    if all(mask is None for mask in masks):
        return result
    return under_grammar(result, masks, state, acceptance)


def together(trees: Sequence[DraftTree], others: Sequence[DraftTree]) -> list[DraftTree]:
    """Each request's draft tokens of both, in one of its two trees."""
    return [_both(tree, other) for tree, other in zip(trees, others, strict=True)]


def _both(tree: DraftTree, other: DraftTree) -> DraftTree:
    if tree.num_nodes == 1:
        return other
    tree.merge(other)
    return tree


def credited(trees: Sequence[DraftTree], step: StepResult) -> list[list[str]]:
    """The source of each accepted token; of several that drafted it, the surest one."""
    return [
        [source_of(tree.keys[node]) for node in path]
        for tree, path in zip(trees, step.paths, strict=True)
    ]


def source_of(key: Any) -> str:
    """The source whose draft tokens have this key."""
    return str(key[0] if isinstance(key, tuple) else key)


def build_sources(
    context: DraftContext, names: Sequence[str], options: Mapping[str, Mapping[str, Any]]
) -> list[TreeDrafter]:
    """Raises ConfigError for a source without anything to draft with, or a wrong option."""
    sources: list[TreeDrafter] = []
    for name in dict.fromkeys(names):
        drafter = build_drafter(name, context, options.get(name))
        assert isinstance(drafter, TreeDrafter), name
        sources.append(drafter)
    return sources


def shared_estimate(context: DraftContext) -> AcceptanceEstimate:
    """The acceptance estimate that all requests of this engine share."""
    return context.remembered(ACCEPTANCE, AcceptanceEstimate)


def usual_sources(
    context: DraftContext, requested: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """(sources, why expected ones are missing)."""
    if requested is not None:
        return list(requested), []
    names, reasons = ["suffix"], []
    if context.heads is not None:
        names.append("medusa")
    else:
        names.append("recycling")  # beside heads it takes their place and is right less often
        refused = context.heads_refused
        reasons.append(
            f"heads refused: {refused}" if refused else f"no heads for {context.base.info.name!r}"
        )
    if context.draft_model is not None:
        names.append("draft-model")
    if num_layers(context.base.config):
        _, error = layers_or_error(context.base, context.memory)
        if error is None:
            names.append("mtp")
        elif isinstance(error, CheckpointError):  # the base's own files are damaged
            raise error.with_traceback(None)
        else:
            reasons.append(error.message)
    return names, reasons

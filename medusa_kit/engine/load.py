"""`medusa_kit.load`: base model, heads and tree, checked and put together."""

import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_kit import console
from medusa_kit.base.fingerprint import Match, compare
from medusa_kit.base.model import CHECKPOINT, BaseModel, load_base_model
from medusa_kit.base.placement import AUTO
from medusa_kit.drafters.memory import Memory
from medusa_kit.engine.before_loading import (
    UNTRAINED_HEADS,
    AnyTree,
    check_loading,
    no_heads_for,
    paired_heads,
    read_tree,
)
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.heads import MedusaHeads, load_heads
from medusa_kit.heads.formats.files import heads_place
from medusa_kit.infer.accept.logits_processing import check_own_values
from medusa_kit.infer.backends import prepare_backends
from medusa_kit.infer.cpu.heads import install_native_heads
from medusa_kit.infer.cpu.int8_weights import with_weights
from medusa_kit.settings.drafters import check_drafting
from medusa_kit.settings.engine import read_engine_config
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.plan import Tree, TreePlan

FITTING = (Match.SAME, Match.COPY)


def load(
    name: str,
    *,
    heads: str | Path | MedusaHeads | None = "auto",
    tree: AnyTree = None,
    dtype: str = AUTO,
    device: str = AUTO,
    weights: str = CHECKPOINT,
    attention: str = "auto",
    fixed_shapes: str = "auto",
    compiled: bool = False,
    revision: str | None = None,
    force: bool = False,
    drafter: str | None = None,
    drafter_options: Mapping[str, Any] | None = None,
    draft_model: str | BaseModel | None = None,
    fallback: str | None = None,
) -> Engine:
    """An engine for the base model `name` (a Hub id, folder, GGUF file or the embedded one).

    `heads`: auto (paired with the base, else shipped with the kit, else none), None, a folder, a
    Hub id (ORG/NAME or ORG/NAME@REVISION), or `untrained`. `tree`: a tree, static or dynamic, its
    file or a list of choices; else the one beside the heads. `dtype`: auto (on CUDA the
    checkpoint's own, elsewhere float32), float32, bfloat16, float16 or float64. `weights`:
    checkpoint, its own, or int8: rounded, on a CPU; LOSSY, the words are another model's
    (medusa_kit.infer.cpu.int8_weights).
    `attention`: what computes tree attention (auto, sdpa, flash, triton).
    `fixed_shapes`: whether greedy steps run whole on the device (auto: on CUDA, as a CUDA graph;
    always, never); `compiled`: with the model's forward through torch.compile.
    `force` puts heads on a base with another fingerprint.
    `drafter`: who guesses ahead, a name of settings.drafters.DRAFTERS with its `drafter_options`
    (auto unless given); `draft_model`: a smaller model, for drafters that use one. `fallback`: the
    drafter where there are no heads or they do not fit. Heads that do not fit are an error unless
    something else was told to draft: a fallback, a draft model, drafter auto.
    `load_config` reads all of these from a file.
    Raises CheckpointError, IncompatibleBaseError, TreeError, ConfigError.
    """
    check_loading(**locals())
    base = load_base_model(name, dtype=dtype, device=device, revision=revision)
    check_own_values(base.model)
    engine = build_engine(
        base,
        heads=heads,
        tree=tree,
        weights=weights,
        attention=attention,
        fixed_shapes=fixed_shapes,
        compiled=compiled,
        force=force,
        drafter=drafter,
        drafter_options=drafter_options,
        draft_model=draft_model,
        fallback=fallback,
    )
    engine.usual_drafter = "auto"
    return engine


def load_config(path: str | Path, **changes: Any) -> Engine:
    """The engine that a YAML file describes (medusa_kit.settings.engine; recipes/engines/).

    `changes`: arguments of `load` that win over the file, `name` for another base model.
    Raises what `load` raises; ConfigError for a file that is not understood.
    """
    return load(**read_engine_config(path).arguments(changes))


def build_engine(
    base: BaseModel,
    *,
    heads: str | Path | MedusaHeads | None = None,
    tree: AnyTree = None,
    weights: str = CHECKPOINT,
    attention: str = "auto",
    fixed_shapes: str = "auto",
    compiled: bool = False,
    force: bool = False,
    drafter: str | None = None,
    drafter_options: Mapping[str, Any] | None = None,
    draft_model: str | BaseModel | None = None,
    fallback: str | None = None,
    keep_layers: bool = False,
) -> Engine:
    """The same around a base model already loaded; trees are self-checked on it first.

    `weights`: int8 rounds those of `base` itself, in place. `keep_layers`: none of the model's own
    layers is exchanged for a faster one.
    """
    if keep_layers and weights != CHECKPOINT:
        raise ConfigError(f"weights {weights!r} change the model, which was to keep its layers")
    check_drafting(drafter, drafter_options, draft_model is not None, fallback)
    backends = prepare_backends(
        with_weights(base, weights), attention, fixed_shapes, compiled, keep_layers
    )
    plain = Engine(
        backends.verifier,
        backends.check,
        graphs=backends.graphs,
        drafter=drafter,
        drafter_options=dict(drafter_options or {}),
        draft_model=draft_model,
        fallback=fallback,
    )
    return with_heads(plain, heads, tree=tree, force=force)


def with_heads(
    engine: Engine,
    heads: str | Path | MedusaHeads | None,
    *,
    tree: AnyTree = None,
    force: bool = False,
) -> Engine:
    """Another engine around the same base model and verifier, with these heads and this tree.

    It drafts as `engine` was told to; what drafters keep between calls is its own.
    """
    base, folder, refused = engine.base, None, None
    if heads == "untrained":
        heads = MedusaHeads.for_base(base, UNTRAINED_HEADS).requires_grad_(False)
    if isinstance(heads, str | Path):
        folder = find_heads(base, heads)
        heads, refused = _heads_from(folder, engine, force) if folder else (None, None)
    if heads is None and tree is not None and refused is None:
        raise no_heads_for(base.info.name)
    result = replace(
        engine,
        heads=heads,
        tree=CandidateTree.root_only(),
        plan=None,
        heads_source=str(folder) if heads is not None and folder else None,
        heads_refused=refused,
        memory=Memory(),
    )
    if heads is not None:
        if engine.verifier.native is not None:
            install_native_heads(heads, engine.verifier.native)
        result.use_tree(_tree_for(heads, tree, folder))
    return result


def _heads_from(folder: Path, engine: Engine, force: bool) -> tuple[MedusaHeads | None, str | None]:
    """(the heads, None); (None, why not) where they do not fit and something else can draft."""
    try:
        return load_heads(folder, engine.base, force), None
    except IncompatibleBaseError as error:
        if not engine.drafts_without_heads:
            raise
        console.warn(f"going on without heads: {error.message}")
        return None, error.message


def find_heads(base: BaseModel, heads: str | Path) -> Path | None:
    """The folder that `heads` stands for; None when `auto` finds nothing."""
    if heads == "auto":
        return paired_heads(base.info.name) or shipped_heads(base.info.fingerprint)
    return heads_place(heads)


def shipped_heads(fingerprint: str) -> Path | None:
    """Heads that lie in the package for the base with this fingerprint."""
    root = Path(str(importlib.resources.files("medusa_kit"))) / "assets" / "heads"
    for config in sorted(root.glob("*/config.json")):
        told = json.loads(config.read_text(encoding="utf-8"))
        if compare(told["base_fingerprint"], fingerprint) in FITTING:
            return config.parent
    return None


def _tree_for(heads: MedusaHeads, tree: Any, folder: Path | None) -> Tree | TreePlan:
    if (found := read_tree(tree, folder)) is not None:
        return found
    console.note(
        "no tree.json beside the heads: drafting each head's best guess in a chain "
        "(`medusa-kit tree-search` finds the tree that suits this machine)"
    )
    return CandidateTree.chain(heads.num_heads)

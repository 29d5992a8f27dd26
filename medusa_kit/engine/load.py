"""`medusa_kit.load`: base model, heads and tree, checked and put together."""

import functools
import importlib.resources
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from medusa_kit import console
from medusa_kit.base.families import refuse_impossible
from medusa_kit.base.fingerprint import Match, compare
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import CHECKPOINT, BaseModel
from medusa_kit.base.still import while_still
from medusa_kit.engine.before_loading import (
    UNTRAINED_HEADS,
    AnyTree,
    check_loading,
    check_options,
    no_heads_for,
    paired_heads,
    read_tree,
)
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_encoding import warn_if_config_differs, warn_if_tokenizer_differs
from medusa_kit.engine.tree_origin import check_tree
from medusa_kit.engine.tree_precision import note_if_precision_differs
from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.garbage import no_search
from medusa_kit.heads import MedusaHeads, load_heads
from medusa_kit.heads.derived import TREE_NAME
from medusa_kit.heads.formats.files import local_heads_folder
from medusa_kit.infer.cpu.heads import install_native_heads
from medusa_kit.infer.cpu.packed.int8_weights import with_weights
from medusa_kit.infer.cpu.packed_base import base_for_decoding
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.decode.accept.logits_processing import check_own_values
from medusa_kit.infer.decode.measured import MeasuredSteps
from medusa_kit.infer.decode.scheduler import Scheduler, max_kept_bytes
from medusa_kit.infer.mkl_linear import forget_packs
from medusa_kit.infer.runners.backends import Backends, prepare_backends
from medusa_kit.settings.engine import (
    Activations,
    Attention,
    CacheDType,
    DrafterName,
    DType,
    EngineConfig,
    EngineOptions,
    Fallback,
    FixedShapes,
    Guesses,
    PrefixCache,
    Weights,
    all_options,
    check_names,
)
from medusa_kit.settings.engine_file import read_engine_file
from medusa_kit.store.beside import found_beside
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.plan import Tree, TreePlan
from medusa_kit.usual_device import on_usual_device

FITTING = (Match.SAME, Match.COPY, Match.SAME_NORMS)  # best first
PLAIN = EngineOptions(heads=None, guesses="all")


P = ParamSpec("P")
R = TypeVar("R")


def _with_options(function: Callable[P, R]) -> Callable[P, R]:
    """Its docstring gets the options' descriptions, and an unknown keyword names the nearest."""
    known = list(inspect.signature(function).parameters)
    lines = [
        f"    {option.name}: {option.description}"
        for option in all_options().values()
        if not option.required
    ]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines])

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        _by_todays_name(kwargs)
        check_names(kwargs, known)
        return function(*args, **kwargs)

    return call


def _by_todays_name(given: dict[str, Any]) -> None:
    """`model` was `name` in version 0.1."""
    if "name" in given and "model" not in given:
        given["model"] = given.pop("name")


# The signature is spelled out for editors, mypy and help(); a test holds it equal to EngineConfig.
@_with_options
@on_usual_device
def load(
    model: str,
    *,
    heads: str | Path | MedusaHeads | None = "auto",
    tree: AnyTree = None,
    dtype: DType = "auto",
    device: str = "auto",
    weights: Weights = "checkpoint",
    activations: Activations = "float32",
    cache: CacheDType = "float32",
    attention: Attention = "auto",
    fixed_shapes: FixedShapes = "auto",
    compiled: bool = False,
    revision: str | None = None,
    check: bool = False,
    force: bool = False,
    drafter: DrafterName | None = None,
    drafter_options: Mapping[str, Any] | None = None,
    draft_model: str | BaseModel | None = None,
    fallback: Fallback | None = None,
    prefix_cache: PrefixCache = "on",
    guesses: Guesses = "paying",
) -> Engine:
    """An engine for the base model `model` (Hub id, folder, GGUF file or a name of the kit's own).

    The options are those of medusa_kit.settings.engine.EngineConfig, which describes each, and of
    the command line. Here `heads` may be heads, and None for none of them; `tree` a tree, static
    or dynamic, or a list of choices; `draft_model` a base model.
    Heads that do not fit are an error unless something else was told to draft: a fallback, a draft
    model, drafter auto. `load_config` reads all of these from a file.
    Raises CheckpointError, IncompatibleBaseError, TreeError, ConfigError.
    """
    return _load(EngineConfig(**locals()))


@on_usual_device
def load_config(path: str | Path, **changes: Any) -> Engine:
    """The engine that a YAML file describes (medusa_kit.settings.engine_file; recipes/engines/).

    `changes`: arguments of `load` that win over the file, `model` for another base model.
    Raises what `load` raises; ConfigError for a file that is not understood.
    """
    _by_todays_name(changes)
    return load(**read_engine_file(path).arguments(changes))


@no_search()
def _load(config: EngineConfig) -> Engine:
    check_loading(config)
    placement: dict[str, Any] = {
        "dtype": config.dtype, "device": config.device, "revision": config.revision,
        "check": config.check,
    }  # fmt: skip
    if config.attention == "auto" and config.fixed_shapes != "always":
        base = base_for_decoding(config.model, weights=config.weights, **placement)
    else:
        base = load_base_model(config.model, **placement)
    check_own_values(base)
    engine = build_engine(base, config)
    engine.usual_drafter = "auto"
    engine.read_drafters_files()
    return engine


@on_usual_device
def build_engine(
    base: BaseModel, options: EngineOptions = PLAIN, *, keep_layers: bool = False
) -> Engine:
    """An engine around a base model already loaded; trees are self-checked on it first.

    Without `options` it has no heads. Their `weights`: int8 rounds those of `base` itself, in
    place. `keep_layers`: none of the model's own layers is exchanged for a faster one.
    """
    if keep_layers and options.weights != CHECKPOINT:
        raise ConfigError(
            f"weights {options.weights!r} change the model, which was to keep its layers"
        )
    check_options(options)
    refuse_impossible(base.config, base.info.name)
    base = with_weights(base, options.weights)

    def prepare() -> Backends:
        base.changes()
        if base.is_handed_out:  # packs of an earlier engine may be of other numbers
            forget_packs(base.own_model)
        return prepare_backends(
            base,
            options.attention,
            options.fixed_shapes,
            options.compiled,
            keep_layers,
            options.cache,
            options.activations,
        )

    backends = while_still(lambda: base.look(), prepare)
    verifier, reuse = backends.verifier, options.prefix_cache == "on"
    scheduler = Scheduler(
        verifier,
        reuse_prefixes=reuse,
        kept_bytes=max_kept_bytes(base.device) if reuse or verifier.captures else 0,
        steps=MeasuredSteps(verifier) if options.guesses == "paying" else None,
    )
    plain = Engine(
        verifier,
        backends.check,
        scheduler,
        drafter=options.drafter,
        drafter_options=dict(options.drafter_options or {}),
        draft_model=options.draft_model,
        fallback=options.fallback,
    )
    return with_heads(plain, options.heads, tree=options.tree, force=options.force)


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
        memory=engine.memory.for_other_heads(),
    )
    if heads is not None:
        if isinstance(result.verifier, NativeVerifier):
            native = result.verifier
            install_native_heads(heads, native.native, folder, native.decoder_now)
        beside = tree
        if tree is None and folder is not None:
            beside = found_beside(folder, TREE_NAME)
        of_tree = Path(beside) if isinstance(beside, str | Path) else None
        if of_tree is not None and of_tree.is_file():
            check_tree(of_tree, heads.digest, None if force else base, named=tree is not None)
        result.use_tree(_tree_for(heads, tree, folder))
        note_if_precision_differs(of_tree, result.activations)
        if folder is not None:
            warn_if_tokenizer_differs(heads.config, base, folder, of_tree)
            warn_if_config_differs(heads.config, base, folder, of_tree)
    return result


def _heads_from(folder: Path, engine: Engine, force: bool) -> tuple[MedusaHeads | None, str | None]:
    """(the heads, None); (None, why not) where they do not fit and something else can draft."""
    try:
        return load_heads(folder, engine.base, force), None
    except IncompatibleBaseError as error:
        if not engine.drafts_without_heads:
            raise
        console.warn(f"continuing without heads: {error.message}")
        return None, error.message


def find_heads(base: BaseModel, heads: str | Path) -> Path | None:
    """The folder that `heads` stands for; None when `auto` finds nothing."""
    if heads == "auto":
        return paired_heads(base.info.name) or shipped_heads(base.info.fingerprint)
    return local_heads_folder(heads)


def shipped_heads(fingerprint: str) -> Path | None:
    """Heads that lie in the package for the base with this fingerprint, or for another quantisation
    of it: those that fit best."""
    root = Path(str(importlib.resources.files("medusa_kit"))) / "assets" / "heads"
    found = dict[Match, Path]()
    for config in sorted(root.glob("*/config.json")):
        description = json.loads(config.read_text(encoding="utf-8"))
        found.setdefault(compare(description["base_fingerprint"], fingerprint), config.parent)
    return next((found[match] for match in FITTING if match in found), None)


def _tree_for(heads: MedusaHeads, tree: Any, folder: Path | None) -> Tree | TreePlan:
    if (given_tree := read_tree(tree, folder)) is not None:
        return given_tree
    if folder is None:  # heads that are made up, or in memory: a tree cannot lie beside them
        return CandidateTree.chain(heads.num_heads)
    console.note(
        "no tree.json next to the heads: drafting each head's likeliest token in a chain "
        "(`medusa-kit tree-search` finds the tree that suits this machine)"
    )
    return CandidateTree.chain(heads.num_heads)

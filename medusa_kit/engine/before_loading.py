"""Checks before a base is loaded: options, heads and trees are compared with each other and with
the base's config.

Loading and the self-check of trees take a while; whoever mistyped a folder should not wait for
them. What only the weights tell, such as a fingerprint, is left to loading.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from medusa_kit.base.files import (
    built_sizes,
    check_readable,
    dtype_of_gguf,
    gguf_source,
    quiet_transformers,
    stored_config,
    stored_generation_config,
)
from medusa_kit.base.model import BaseModel
from medusa_kit.base.own_models import prepare_first_start
from medusa_kit.base.placement import AUTO, load_dtype, pick_device, requested_dtype
from medusa_kit.drafters.draft_model.loading import of_draft_model
from medusa_kit.drafters.native.damaged import A_MODEL
from medusa_kit.drafters.native.damaged import check_weights as check_weights_are_whole
from medusa_kit.drafters.native.layer_drafts import check_fits, draft_config, is_there
from medusa_kit.drafters.native.other_kinds import refuse_other_kinds
from medusa_kit.engine.tree_origin import check_tree
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.checkpoint import PAIRED_FOLDER, WEIGHTS_NAME, read_heads, says_ours
from medusa_kit.heads.derived import TREE_NAME
from medusa_kit.heads.digest import heads_digest
from medusa_kit.heads.formats.files import local_heads_folder
from medusa_kit.heads.formats.recognise import read_foreign
from medusa_kit.heads.weights_base import check_weights_base
from medusa_kit.infer.attention import choice
from medusa_kit.infer.cpu.activations import check_before_loading as check_activations
from medusa_kit.infer.cpu.packed.int8_weights import check_before_loading as check_weights
from medusa_kit.infer.cpu.verifier import refuse_large_trees
from medusa_kit.infer.decode.accept.generation_settings import check_own_settings
from medusa_kit.infer.decode.accept.logits_processing import check_bias_ids
from medusa_kit.infer.device.shapes import check_before_loading as check_compiled
from medusa_kit.paths import expanded
from medusa_kit.settings.drafters import check_drafting, drafts_without_heads
from medusa_kit.settings.engine import EngineConfig, EngineOptions, all_options
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.store.beside import found_beside
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree
from medusa_kit.tree.plan import Tree, TreePlan, load_plan

UNTRAINED_HEADS = 4
# What Python may give in place of text: (types, in words).
OBJECTS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "heads": ((str, Path, MedusaHeads), "text, a path, heads or None"),
    "tree": ((str, Path, list, CandidateTree, DynamicTree, TreePlan),
             "text, a path, a tree or a list of choices"),
    "draft_model": ((str, BaseModel), "text or a base model"),
}  # fmt: skip
AnyTree = Tree | TreePlan | str | Path | list[list[int]] | None


def check_loading(config: EngineConfig) -> None:
    """Check what can be known of the options of `medusa_kit.load` by now. Raises what `load`
    raises."""
    quiet_transformers()
    model, revision, device = config.model, config.revision, pick_device(config.device)
    prepare_first_start(model)
    check_compiled(config.fixed_shapes, config.compiled, device.type)
    check_weights(config.weights, model, config.dtype, config.device, revision)
    check_activations(config)
    check_options(config)
    _check_attention(config.attention, model, config.dtype, device, revision)
    given = (config.drafter, config.draft_model is not None, config.fallback)
    tree = check_heads(
        model, revision, config.heads, config.tree, config.force, drafts_without_heads(*given)
    )
    for planned in () if tree is None else TreePlan.of_any(tree).trees:
        refuse_large_trees(config.activations, planned.tree.num_nodes)
    _check_draft_models(config)
    _check_draft(config.draft_model, model, revision)
    if (settings := stored_generation_config(model, revision)) is not None:
        check_own_settings(settings)


def check_options(options: EngineOptions) -> None:
    """Check objects, and the drafter's options against each other. Raises ConfigError."""
    for name, (types, expected) in OBJECTS.items():
        if (value := getattr(options, name)) is not None:
            all_options()[name].check_kind(value, types, expected)
    check_drafting(
        options.drafter,
        options.drafter_options,
        options.draft_model is not None,
        options.fallback,
    )


def _check_draft_models(options: EngineOptions) -> None:
    """Raises CheckpointError for one that cannot be found, ConfigError for one that is none."""
    named = {"draft_model": options.draft_model, "options": options.drafter_options}
    for name in _draft_models(named):
        refuse_other_kinds(name)
        if is_there(name):  # and may be of a class of its own
            continue
        try:
            check_readable(name)
        except CheckpointError as error:
            raise of_draft_model(name, error) from error
        check_weights_are_whole(name, A_MODEL)


def _check_draft(draft: Any, base: str, revision: str | None) -> None:
    """Raises ConfigError, IncompatibleBaseError for one that reads layers, none of this base's."""
    if (config := draft_config(draft)) is None:
        return
    if (stored := stored_config(base, revision)) is not None:
        check_fits(draft, config, stored)


def _draft_models(options: Mapping[str, Any]) -> Iterator[str]:
    """Names of draft models, those in the options of drafters and their sources included."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _draft_models(value)
        elif key == "draft_model" and isinstance(value, str):
            yield value


def _check_attention(
    attention: str, name: str, dtype: str, device: torch.device, revision: str | None
) -> None:
    load_in = requested_dtype(dtype, device)
    if isinstance(load_in, str) and (gguf := gguf_source(name)) is not None:
        load_in = dtype_of_gguf(gguf)
    if isinstance(load_in, str) and attention != "auto":
        config = stored_config(name, revision)
        load_in = AUTO if config is None else load_dtype(load_in, config)
    if not isinstance(load_in, str):  # else only the weights tell
        choice.check_before_loading(attention, device.type, load_in)


def check_heads(
    name: str,
    revision: str | None,
    heads: str | Path | MedusaHeads | None,
    tree: AnyTree,
    force: bool,
    optional: bool,
) -> Tree | TreePlan | None:
    """The tree that heads are to fill. `optional`: heads that do not fit the base are left out,
    which loading tells.

    Raises CheckpointError, TreeError, ConfigError, IncompatibleBaseError.
    """
    if heads is None and tree is not None:
        raise no_heads_for(name)
    given, folder = read_tree(tree, None), None
    numbers: tuple[int, int | None] | None = None
    if isinstance(heads, MedusaHeads):
        numbers = heads.num_heads, heads.num_columns
    elif heads == "untrained":
        numbers = UNTRAINED_HEADS, None
    elif heads is not None:
        folder = paired_heads(name) if heads == "auto" else local_heads_folder(heads)
    if folder is not None:
        beside = found_beside(folder, TREE_NAME) if given is None else None
        numbers = _stored_numbers(folder, None if optional else (name, revision), force, beside)
        given = read_tree(None, folder) if given is None else given
    if given is not None and numbers is not None:
        num_heads, columns = numbers
        given.check_fits(num_heads, 1 << 40 if columns is None else columns)
    return given


def no_heads_for(name: str) -> ConfigError:
    return ConfigError(
        f"a tree needs heads to fill it, and there are none for {name!r}",
        hint="name the heads' folder, or train some with `medusa-kit train`",
    )


def paired_heads(name: str) -> Path | None:
    """Heads that lie inside their base's own folder."""
    folder = expanded(name) / PAIRED_FOLDER
    return folder if (folder / "config.json").is_file() else None


def read_tree(tree: AnyTree, folder: Path | None) -> Tree | TreePlan | None:
    """The tree given, else the one beside the heads in `folder`, if there is one."""
    if isinstance(tree, CandidateTree | DynamicTree | TreePlan):
        return tree
    if isinstance(tree, list):
        return CandidateTree.from_choices(tree)
    beside = None if folder is None else found_beside(folder, TREE_NAME)
    path = beside if tree is None else expanded(tree)
    if path is not None and (tree is not None or path.is_file()):
        return load_plan(path)
    return None


def check_bias(name: str, revision: str | None, params: SamplingParams) -> None:
    """Raises ConfigError for a bias on a token that the base lacks."""
    if not params.logit_bias:
        return
    config = stored_config(name, revision)
    if config is None or max(params.logit_bias) < config.vocab_size:
        return
    if (sizes := built_sizes(config)) is not None:
        check_bias_ids(params, sizes["vocabulary size"])


def _stored_numbers(
    folder: Path, base: tuple[str, str | None] | None, force: bool, beside: Path | None
) -> tuple[int, int | None]:
    """(heads, columns of each) of the heads in `folder`, compared with the config of `base` and
    with the tree `beside` them, which may not be there."""
    if not says_ours(folder) and (foreign := read_foreign(folder, quiet=True)) is not None:
        rows = [len(matrix_RD) for matrix_RD in foreign.matrix_list()[:1]]
        expected: dict[str, Any] = {"hidden size": foreign.hidden_size}
        if foreign.token_map_R is not None:
            columns: int | None = len(foreign.token_map_R)
        elif (columns := rows[0] if rows else foreign.vocab_size) is not None:
            expected["vocabulary size"] = columns
        num_heads, about = foreign.num_heads, f"these {foreign.format} heads"
    else:
        config, tensors = read_heads(folder)
        if base is not None:
            check_weights_base(folder / WEIGHTS_NAME, config, force, tell=False)
        if beside is not None and beside.is_file():
            check_tree(beside, heads_digest(config, tensors), None, tell=False)
        num_heads, columns = config.num_heads, config.reduced_size or config.vocab_size
        expected = {"hidden size": config.hidden_size, "vocabulary size": config.vocab_size}
        if not force:
            expected["architecture"] = config.base_model_type
        about = f"these heads were trained for {config.base_model_name!r} and"
    if base is not None:
        _check_fit(about, expected, *base)
    return num_heads, columns


def _check_fit(about: str, expected: dict[str, Any], name: str, revision: str | None) -> None:
    config = stored_config(name, revision)
    if config is None:
        return
    actual = {"hidden size": config.hidden_size, "vocabulary size": config.vocab_size,
              "architecture": config.model_type}  # fmt: skip
    if all(actual[what] == value for what, value in expected.items()):
        return
    built = built_sizes(config)  # some families project the hidden state to another size
    if built is None:
        return
    actual |= built
    differing = [f"{what} {value!r} ≠ {actual[what]!r}" for what, value in expected.items()
                 if value != actual[what]]  # fmt: skip
    if differing:
        raise IncompatibleBaseError(
            f"{about} do not fit {name!r}: {'; '.join(differing)} (heads ≠ base)",
            hint="load the base they were trained on",
        )

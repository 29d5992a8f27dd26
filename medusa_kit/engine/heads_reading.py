"""Heads read for an engine that serves many: with their tree, and their adapter if there is one."""

from dataclasses import replace
from pathlib import Path

from medusa_kit import console
from medusa_kit.base import adapters
from medusa_kit.base.adapter_layers import AdapterLayers
from medusa_kit.base.adapters import CONFIG_NAME as ADAPTER_CONFIG
from medusa_kit.base.faults.out_of_memory import is_out_of_memory
from medusa_kit.engine.before_loading import read_tree
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_encoding import warn_if_config_differs, warn_if_tokenizer_differs
from medusa_kit.engine.heads_folder import HeadsLocation
from medusa_kit.engine.load import with_heads
from medusa_kit.engine.tree_origin import check_tree
from medusa_kit.engine.tree_precision import note_if_precision_differs
from medusa_kit.errors import CheckpointError, ConfigError, DeviceMemoryError, MedusaKitError
from medusa_kit.heads import load_heads
from medusa_kit.heads.checkpoint import PAIRED_FOLDER
from medusa_kit.heads.derived import TREE_NAME
from medusa_kit.infer.runners.adapted_verifier import adapted
from medusa_kit.settings.drafters import READ_HEADS
from medusa_kit.store.beside import found_beside


def read_heads(engine: Engine, folder: Path, name: str) -> tuple[Engine, int]:
    """Another engine with these heads, and the bytes that they take beside the base. Raises
    CheckpointError, IncompatibleBaseError, TreeError, ConfigError."""
    size, inside = 0, heads_inside(folder)
    if inside != folder:
        engine, size = _adapted(engine, folder, name)
    heads = load_heads(inside, engine.base, pickles=False)
    tree = found_beside(inside, TREE_NAME)
    if tree.is_file():
        check_tree(tree, heads.digest, engine.base)
    result = with_heads(engine, heads, tree=read_tree(None, inside))
    warn_if_tokenizer_differs(heads.config, engine.base, inside, tree)
    warn_if_config_differs(heads.config, engine.base, inside, tree)
    note_if_precision_differs(tree, engine.activations)
    result.heads_source = name
    return result, size + heads.num_bytes


def heads_inside(folder: Path) -> Path:
    """Where the heads are: in a folder of their own beside an adapter."""
    return folder / PAIRED_FOLDER if (folder / ADAPTER_CONFIG).is_file() else folder


def drafting_with_heads(engine: Engine) -> Engine:
    """The engine that named heads are put into: one told to draft without heads takes its usual
    drafter, since they were asked for."""
    if engine.drafter in (None, *READ_HEADS):
        return engine
    return replace(engine, drafter=None, drafter_options={})


def _adapted(engine: Engine, folder: Path, name: str) -> tuple[Engine, int]:
    """The engine with the LoRA adapter that Medusa-2 wrote to `folder`, and its bytes. Raises
    ConfigError where steps cannot have one, CheckpointError, IncompatibleBaseError."""
    plain = engine.verifier
    if plain.reads_packed_weights:
        raise ConfigError(
            f"heads {name!r} come with a LoRA adapter; steps on this server run in "
            f"{plain.steps_run_by}, on weights packed at load",
            hint="serve a model with the adapter merged into it (joint.save_merged), or let torch "
            "run the steps: --attention sdpa",
        )
    base, info = engine.base, adapters.read_info(folder)
    adapters.check_base(info, base.info.fingerprint, folder)
    layers = AdapterLayers(folder, base)
    view = base.view()
    own = str(base.adapted_fingerprint(adapters.variant_of(folder)))
    view.info = replace(base.info, fingerprint=own)
    verifier = adapted(plain, view, layers)
    return replace(engine, verifier=verifier), layers.num_bytes


def explained(error: Exception, location: HeadsLocation) -> MedusaKitError:
    """The error for those who asked, who need not know where the folder is."""
    if not isinstance(error, MedusaKitError):
        if is_out_of_memory(error):
            why = f"there is no memory for heads {location.name!r}"
            return DeviceMemoryError(why, hint="ask again later")
        console.warn(f"heads {location.name!r}: {type(error).__name__}: {error}")
        return CheckpointError(f"heads {location.name!r} cannot be loaded: {type(error).__name__}")
    texts = [error.message, error.hint]
    if location.folder is not None:
        texts = [text and text.replace(str(location.folder), location.name) for text in texts]
    return type(error)(texts[0] or "", hint=texts[1])

"""Loads and prepares the draft model once for an engine, in its base's dtype and on its device."""

from medusa_kit import console
from medusa_kit.base.families import needs_chains
from medusa_kit.base.model import BaseModel
from medusa_kit.base.still import while_still
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.native.damaged import A_MODEL, check_stored_numbers
from medusa_kit.drafters.native.other_kinds import refuse_other_kinds
from medusa_kit.errors import (
    AnyError,
    CheckpointError,
    ConfigError,
    IncompatibleBaseError,
    ModelChangedError,
)
from medusa_kit.infer.cpu.packed_base import base_for_decoding
from medusa_kit.infer.runners.adapted_verifier import AdaptedVerifier
from medusa_kit.infer.runners.backends import prepare_backends
from medusa_kit.infer.verifier import Verifier


def draft_verifier(context: DraftContext) -> Verifier:
    """Raises ConfigError where none is named, and as load_base_model and prepare_backends do."""
    named, base = context.draft_model, context.base
    own = context.verifier
    plain = own.plain if isinstance(own, AdaptedVerifier) else own
    if named is None:
        raise ConfigError(
            f"drafter draft-model: no draft model is named for {base.info.name!r}",
            hint="name a smaller model of the same family: --draft-model MODEL",
        )
    if named in (base, plain.base):
        return _read_back(own)

    def prepare() -> Verifier:
        draft = _loaded(named, base) if isinstance(named, str) else named
        sizes = draft.info.num_parameters, base.info.num_parameters
        if sizes[0] > sizes[1]:
            console.warn(
                f"the draft model {draft.info.name} has {sizes[0] / 1e6:,.1f}M parameters, more "
                f"than the {sizes[1] / 1e6:,.1f}M of {base.info.name}: each of its forwards "
                "costs more than one it may save"
            )
        try:
            return while_still(lambda: draft.look(), lambda: _prepared(draft))
        except (CheckpointError, IncompatibleBaseError, ModelChangedError) as error:
            raise of_draft_model(draft.info.name, error) from error

    return context.memory.loaded.remembered(
        ("draft model", named if isinstance(named, str) else id(named)), prepare
    )


def _prepared(draft: BaseModel) -> Verifier:
    draft.changes()  # since the caller wrapped it
    return _read_back(prepare_backends(draft, fixed_shapes="never").verifier)


def of_draft_model(name: str, error: AnyError) -> AnyError:
    """The error, which names no model or calls it a base, as one of this draft model."""
    return type(error)(f"draft model {name!r}: {error.message}", hint=error.hint)


def _loaded(name: str, base: BaseModel) -> BaseModel:
    """Raises CheckpointError for a model that cannot be read, or whose weights are no numbers."""
    refuse_other_kinds(name)
    try:
        draft = base_for_decoding(name, dtype=base.info.dtype, device=base.info.device)
    except (CheckpointError, IncompatibleBaseError) as error:
        raise of_draft_model(name, error) from error
    check_stored_numbers(name, A_MODEL)  # the self-check does not see rows of rare tokens
    return draft


def _read_back(verifier: Verifier) -> Verifier:
    """The same, unless what it has read cannot be taken back token by token."""
    if verifier.chains_only:
        name, kind = verifier.base.info.name, verifier.base.info.model_type
        raise ConfigError(
            f"{name!r} ({kind}) cannot be a draft model: {needs_chains(verifier.base.config)}, and "
            "rejected draft tokens could not be taken back",
            hint="name a model with attention alone: --draft-model MODEL",
        )
    return verifier

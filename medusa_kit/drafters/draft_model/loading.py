"""Loads and prepares the draft model once for an engine, in its base's dtype and on its device."""

from medusa_kit import console
from medusa_kit.base.families import needs_chains
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.native.other_kinds import refuse_other_kinds
from medusa_kit.errors import ConfigError
from medusa_kit.infer.backends import prepare_backends
from medusa_kit.infer.cpu.packed.base import base_for_decoding
from medusa_kit.infer.verifier import Verifier


def draft_verifier(context: DraftContext) -> Verifier:
    """Raises ConfigError where none is named, and as load_base_model and prepare_backends do."""
    named, base = context.draft_model, context.base
    if named is None:
        raise ConfigError(
            f"drafter draft-model: no draft model is named for {base.info.name!r}",
            hint="give draft_model: a smaller model of the same family",
        )
    if named is base:
        return _read_back(context.verifier)

    def prepare() -> Verifier:
        draft = named
        if isinstance(draft, str):
            refuse_other_kinds(draft)
            draft = base_for_decoding(draft, dtype=base.info.dtype, device=base.info.device)
        sizes = draft.info.num_parameters, base.info.num_parameters
        if sizes[0] > sizes[1]:
            console.warn(
                f"the draft model {draft.info.name} has {sizes[0] / 1e6:,.1f}M parameters, more "
                f"than the {sizes[1] / 1e6:,.1f}M of {base.info.name}: each of its forwards "
                "costs more than one it may save"
            )
        return _read_back(prepare_backends(draft, fixed_shapes="never").verifier)

    return context.remembered(
        ("draft model", named if isinstance(named, str) else id(named)), prepare
    )


def _read_back(verifier: Verifier) -> Verifier:
    """The same, unless what it has read cannot be taken back token by token."""
    if verifier.chains_only:
        name, kind = verifier.base.info.name, verifier.base.info.model_type
        raise ConfigError(
            f"{name!r} ({kind}) cannot be a draft model: {needs_chains(verifier.base.config)}, and "
            "rejected draft tokens could not be taken back",
            hint="give draft_model: a model with attention alone",
        )
    return verifier

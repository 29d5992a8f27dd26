"""The verifier that a model asks for, of trees or of chains, and one that has been checked."""

from medusa_kit.base.families import needs_chains
from medusa_kit.base.model import BaseModel
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.attention.choice import AttentionChoice, cannot_use
from medusa_kit.infer.chains.verifier import ChainVerifier
from medusa_kit.infer.self_check import TreeCheck, check_backends, check_trees
from medusa_kit.infer.verifier import Verifier


def verifier_for(
    base: BaseModel, attention: AttentionChoice | str = "auto", steps_run_by: str = "torch"
) -> Verifier:
    """The verifier that a base's config asks for. Raises what `Verifier` raises."""
    kind = Verifier if needs_chains(base.config) is None else ChainVerifier
    return kind(base, attention, steps_run_by)


def self_check(base: BaseModel) -> TreeCheck:
    """`check_trees` before heads are trained for a base: without trees they are of no use."""
    return checked_verifier(base)[1]


def checked_verifier(base: BaseModel, attention: str = "auto") -> tuple[Verifier, TreeCheck]:
    """A verifier that has passed `check_trees`, and what was measured.

    Where a backend fails the check and `sdpa`, the reference, passes it, `auto` does without that
    backend and says so. If it was asked for by name, that is an error. Raises ConfigError,
    IncompatibleBaseError.
    """
    verifier = verifier_for(base, attention)
    form = verifier.own_attention
    if form is not None and attention not in ("auto", "sdpa"):
        reason = f"{base.info.model_type} computes its attention itself ({form})"
        raise cannot_use(attention, reason)
    try:
        return verifier, check_backends(verifier)
    except IncompatibleBaseError as error:
        if attention in ("auto", "sdpa"):
            raise
        check_trees(verifier_for(base, "sdpa"))  # raises if the model is at fault
        raise cannot_use(attention, error.message) from error

"""Whether a model's draft tokens are verified as trees or as chains."""

from medusa_kit.base.families import needs_chains
from medusa_kit.base.model import BaseModel
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.chains.verifier import ChainVerifier
from medusa_kit.infer.verifier import Verifier


def verifier_for(
    base: BaseModel, attention: AttentionChoice | str = "auto", steps_run_by: str = "torch"
) -> Verifier:
    """The verifier that a base's config asks for. Raises what `Verifier` raises."""
    kind = Verifier if needs_chains(base.config) is None else ChainVerifier
    return kind(base, attention, steps_run_by)

"""The model's forward under torch.compile, one compiled function for each step.

Shapes: B batch, N nodes with root, S cache slots.
"""

from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel, relative_error
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.cuda_graph.replay import ReplayedStep
from medusa_kit.infer.own_rounding import allowed_error
from medusa_kit.infer.verifier import Forward


def compiled_forward(base: BaseModel, backend: Any = "inductor") -> Forward:
    """torch.compile of decoder and output embedding, compiled when first called.

    They were compared with the whole model when the base was loaded. Raises IncompatibleBaseError
    where the model has no decoder of its own. The function returned raises RuntimeError for what
    does not compile in one piece, so that nothing runs uncompiled unnoticed.
    """
    if not base.decoder_is_exact:
        raise IncompatibleBaseError(f"{base.info.model_type} has no decoder that can stand alone")

    def forward(tokens_BN: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        hidden_BND = base.model.get_decoder()(tokens_BN, **arguments).last_hidden_state
        return hidden_BND, base.head_logits(hidden_BND)

    run = torch.compile(with_own_code(forward), dynamic=False, fullgraph=True, backend=backend)

    def named(tokens_BN: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        from torch._dynamo.exc import TorchDynamoException

        try:
            return cast(tuple[Tensor, Tensor], run(tokens_BN, **arguments))
        except TorchDynamoException as error:
            what = str(error).strip().splitlines() or [type(error).__name__]
            raise RuntimeError(f"torch.compile failed: {what[0]}") from error

    return named


def with_own_code(function: Any) -> Any:
    """The same function with a code object of its own.

    torch caches compiled code by code object, for eight shapes each. All functions made by one
    `def` share their code object, so the ninth shape would run uncompiled.
    """
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def check_compiled(step: ReplayedStep) -> float:
    """Compare the step's compiled forward with the plain one; returns twice what rounding differs.

    Every slot holds random numbers and the rows have different lengths. The first row is as long as
    there is room for, so that every window applies that ever can. Raises IncompatibleBaseError
    where the two differ by more than rounding, since a compiler may be wrong.
    """
    base = step.verifier.base
    step.score(step.lengths_B)  # allocates the slots
    longest = min(step.num_slots - step.num_nodes, base.info.context_length - 1)
    rows_B = torch.arange(step.batch_size, device=step.lengths_B.device)
    lengths_B = longest - rows_B * longest // (2 * step.batch_size)
    step.cache.fill_at_random()
    plain, compiled = (step.score(lengths_B, one)[1] for one in (None, step.forward))
    step.cache.clear()
    error = relative_error(compiled, plain)
    allowed = allowed_error(base, error)
    if not error <= allowed:
        raise IncompatibleBaseError(
            f"the compiled forward of {base.info.name!r} is off by {error:.1e} of its logits' "
            f"spread (allowed {allowed:.0e})",
            hint="decode without compile",
        )
    return 2 * float((compiled.double() - plain.double()).abs().max())

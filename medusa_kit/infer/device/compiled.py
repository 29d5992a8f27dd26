"""The model's forward under torch.compile, one compiled function for each shape.

Shapes: B rows, N nodes of a row, T nodes of all rows, V vocabulary.
"""

from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from medusa_kit.base.model import BaseModel, relative_error
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.infer.device.captured import CapturedForward
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
        hidden_BND = base.own_model.get_decoder()(tokens_BN, **arguments).last_hidden_state
        return hidden_BND, base.head_logits(hidden_BND)

    run = torch.compile(with_own_code(forward), dynamic=False, fullgraph=True, backend=backend)

    def named(tokens_BN: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        from torch._dynamo.exc import TorchDynamoException

        try:
            return cast(tuple[Tensor, Tensor], run(tokens_BN, **arguments))
        except TorchDynamoException as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RuntimeError(f"torch.compile failed: {lines[0]}") from error

    return named


def with_own_code(function: Any) -> Any:
    """A copy of a function with a code object of its own.

    torch caches compiled code by code object, for eight shapes each. All functions made by one
    `def` share their code object, so the ninth shape would run uncompiled.
    """
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def check_compiled(captured: CapturedForward, compiled: Forward, base: BaseModel) -> float:
    """Compare a compiled forward with the plain one on the nodes that were sent; returns twice what
    rounding differs.

    Raises IncompatibleBaseError where the two differ by more than rounding, since a compiler may be
    wrong.
    """
    plain_TV = captured.scores(base.hidden_and_logits).logits
    compiled_TV = captured.scores(compiled).logits
    error = relative_error(compiled_TV, plain_TV)
    allowed = allowed_error(base, error)
    if not error <= allowed:
        raise IncompatibleBaseError(
            f"the compiled forward of {base.info.name!r} is off by {error:.1e} of its logits' "
            f"spread (allowed {allowed:.0e})",
            hint="leave out --compile",
        )
    return 2 * float((compiled_TV.double() - plain_TV.double()).abs().max())

"""That the sanitizers see what the kernels do; only under `make sanitize`."""

import os
import signal

import pytest
import torch

from medusa_kit.infer.cpu.linear import make_native

pytestmark = pytest.mark.skipif(
    "libasan" not in os.environ.get("LD_PRELOAD", ""), reason="make sanitize"
)


@pytest.mark.parametrize("short", [0, 1])
def test_a_number_too_many_ends_the_process(short: int) -> None:
    """The kernel writes 37 numbers a row; the place for them has that many, or one less."""
    layer = torch.nn.Linear(64, 37).requires_grad_(False)
    assert make_native(layer)
    x_RD, out = torch.randn(2, 64), torch.empty(2 * 37 - short)
    if (child := os.fork()) == 0:
        try:
            packed = layer.packed.struct  # type: ignore[union-attr]
            layer.loaded.mk_linear(packed, x_RD.data_ptr(), 2, out.data_ptr(), 1)  # type: ignore
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    ended = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    assert ended == (short == 0), signal.strsignal(os.WTERMSIG(status))

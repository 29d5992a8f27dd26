"""In which dtype --quick computes hidden states."""

import contextlib
from collections.abc import Callable

import pytest
from torch import Tensor

from medusa_kit.base.model import BaseModel
from medusa_kit.quick import run as quick_run
from medusa_kit.quick import settings
from medusa_kit.quick.run import prepared, run
from medusa_kit.quick.session import Request
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.train.features.rows import Rows


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("fast", [True, False])
def test_16_bits_where_the_processor_multiplies_in_them(
    request_for: Callable[..., Request], monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(settings, "fast_in_bfloat16", lambda device: fast)
    session = prepared(request_for())
    read_by, original = set[str](), Rows.hidden_PD

    def hidden(self: Rows, base: BaseModel) -> Tensor:
        read_by.add(base.info.dtype)
        return original(self, base)

    monkeypatch.setattr(Rows, "hidden_PD", hidden)
    if not fast:  # nothing is read in another dtype, so what comes after is as in other tests
        monkeypatch.setattr(quick_run, "run_search", interrupted)
    with contextlib.nullcontext() if fast else pytest.raises(KeyboardInterrupt):
        run(session)
    expected = "bfloat16" if fast else "float32"
    assert load_recipe(session.recipe).base.dtype == expected
    assert read_by == {expected}
    assert session.base.info.dtype == "float32"  # which answers, and verifies

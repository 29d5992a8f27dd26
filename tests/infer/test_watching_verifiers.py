"""A verifier that watches layers is whole before another thread can find it."""

from typing import Any

from support.small_engines import build_engine
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.verifier import Verifier

LAYERS = (1,)


class Noting(dict[Any, Any]):
    """What verifiers are like when they are put in."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, Any]] = []

    def __setitem__(self, key: Any, verifier: Any) -> None:
        self.found.append((verifier.watched, getattr(verifier, "_compiled", None)))
        super().__setitem__(key, verifier)

    def setdefault(self, key: Any, verifier: Any = None) -> Any:
        if key not in self:
            self[key] = verifier
        return self[key]


def found_of(verifier: Verifier) -> list[tuple[Any, Any]]:
    verifier._watching = noting = Noting()
    first = verifier.with_watched(LAYERS)
    assert first.watched == LAYERS
    assert verifier.with_watched(LAYERS) is first
    return noting.found


def test_of_torch() -> None:
    engine = build_engine(wrap_model(tiny_model("llama"), None, "tiny"), attention="sdpa")
    assert found_of(engine.verifier) == [(LAYERS, None)]


def test_of_compiled_forwards(cuda_stand_in: Any) -> None:
    engine = build_engine(wrap_model(tiny_model("llama").to("cuda"), None, "tiny"))
    assert isinstance(engine.verifier, CapturedVerifier)
    engine.verifier._compiled = lambda *_: None
    assert found_of(engine.verifier) == [(LAYERS, None)]

"""An engine that several threads use."""

from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from support.small_engines import build_engine, random_heads
from support.tiny_models import tiny_model


def family_for(steps: str) -> str:
    return "llama-tied" if steps == "C++" else "llama"


def engine_for(steps: str, seed: int = 0) -> Engine:
    name = family_for(steps)
    base = wrap_model(tiny_model(name, seed), None, f"{name}-{seed}")
    engine = build_engine(base, heads=random_heads(base))
    assert engine.steps_run_by.startswith(steps), engine.steps_run_by
    return engine

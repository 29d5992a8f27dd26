"""Remarks on an answer or a model whose rule, weights or precision are not the usual ones."""

from typing import Any

from medusa_kit.settings.engine import FLOAT32


def rule_note(stats: Any) -> str:
    """A remark after an answer's statistics where rule or weights are not the usual ones."""
    lossy = f"; LOSSY: {', '.join(stats.lossy_by)}" if stats.lossy else ""
    quantised = f"; base quantised ({stats.quantization})" if stats.quantization else ""
    return lossy + quantised + (f"; {precision}" if (precision := precision_of(stats)) else "")


def precision_of(source: Any) -> str:
    """The precision of an engine or of an answer's statistics, in words; empty for float32."""
    return "" if source.activations == FLOAT32 else f"{source.activations} activations"


def weights_note(engine: Any) -> str:
    """A remark after a model's name about its weights; empty where they are its own."""
    info = engine.base.info
    lossy = f", {', '.join(engine.lossy_by)}: lossy" if engine.lossy_by else ""
    quantised = f", quantised ({info.quantization})" if info.quantized else ""
    return lossy + quantised + (f", {precision}" if (precision := precision_of(engine)) else "")


def quantised_note(engine: Any) -> str | None:
    """A remark on what exact means on a quantised base or with rounded activations; None on other
    bases."""
    if precision := precision_of(engine):
        return (
            f"{precision}: answers are held against those of plain decoding in the same precision, "
            "where no difference is rounding; agreement with float32 is counted apart"
        )
    if not engine.base.info.quantized:
        return None
    return (
        f"the base is quantised ({engine.base.info.quantization}): its answers are held against "
        "those of the same quantised model, where a margin below the rounding tolerance "
        f"({engine.rounding_tolerance:.1e}) may flip by rounding"
    )

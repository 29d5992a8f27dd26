"""`train --quick --dry-run`: the plan, the recipe, and what it would need. Writes nothing."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from medusa_kit import console
from medusa_kit.base.placement import pick_device
from medusa_kit.infer.runners.backends import check_base
from medusa_kit.quick import report, settings
from medusa_kit.quick.run import show_plan
from medusa_kit.quick.session import Session
from medusa_kit.settings.recipe import BaseSection, dump
from medusa_kit.train.forecast.described import DescribedBase
from medusa_kit.train.forecast.dry_run import dry_run


def forecast(session: Session) -> str:
    """The plan goes to stderr, as in a run; the rest is returned. Raises what a run raises."""
    console.note(report.engines(session.request.engine))
    show_plan(session)
    request = session.request
    device = pick_device(request.device)
    described = DescribedBase(BaseSection(model=request.model))
    info = replace(described.info, device=str(device))
    base: Any = SimpleNamespace(device=device, info=info)  # as much as a recipe depends on
    recipe = settings.recipe_for(
        base, request.output.resolve(), request.engine, epochs=round(settings.EPOCHS)
    )
    note = "hours are those of hidden states and updates; answers are made before"
    return f"{dump(recipe)}\n{dry_run(recipe, check_base, session.load)}\n{note}"

"""Modules that requests need are imported before the first one: an import opens files, which fails
where too many are open."""

import pkgutil
from contextlib import suppress
from importlib import import_module

from medusa_kit import drafters

OTHERS = ("anyio._backends._asyncio", "jinja2.sandbox", "llguidance.hf")  # some not installed


def import_all() -> None:
    for name in (*OTHERS, *_inside(drafters.__name__, list(drafters.__path__))):
        with suppress(ModuleNotFoundError):
            import_module(name)


def _inside(package: str, paths: list[str]) -> list[str]:
    return [module.name for module in pkgutil.walk_packages(paths, f"{package}.")]

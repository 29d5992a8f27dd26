"""medusa-kit: speculative decoding for a language model you already have, without changing it.

Names load what they need when first used, so importing the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from medusa_kit.garbage import no_search
from medusa_kit.version import __version__

if TYPE_CHECKING:
    from medusa_kit.engine.engine import Engine, GenerationResult
    from medusa_kit.engine.load import load, load_config
    from medusa_kit.engine.transformers_entry import custom_generate, custom_generate_with
    from medusa_kit.errors import MedusaKitError
    from medusa_kit.heads import MedusaHeads, load_heads, save_heads
    from medusa_kit.infer.cpu.binding.kernels import set_num_threads
    from medusa_kit.settings.grammar import Grammar
    from medusa_kit.tree.candidate_tree import CandidateTree

_PLACES = {
    "CandidateTree": "medusa_kit.tree.candidate_tree",
    "Engine": "medusa_kit.engine.engine",
    "GenerationResult": "medusa_kit.engine.engine",
    "Grammar": "medusa_kit.settings.grammar",
    "MedusaHeads": "medusa_kit.heads",
    "MedusaKitError": "medusa_kit.errors",
    "custom_generate": "medusa_kit.engine.transformers_entry",
    "custom_generate_with": "medusa_kit.engine.transformers_entry",
    "load": "medusa_kit.engine.load",
    "load_config": "medusa_kit.engine.load",
    "load_heads": "medusa_kit.heads",
    "save_heads": "medusa_kit.heads",
    "set_num_threads": "medusa_kit.infer.cpu.binding.kernels",
}

__all__ = [
    "CandidateTree",
    "Engine",
    "GenerationResult",
    "Grammar",
    "MedusaHeads",
    "MedusaKitError",
    "__version__",
    "custom_generate",
    "custom_generate_with",
    "load",
    "load_config",
    "load_heads",
    "save_heads",
    "set_num_threads",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'medusa_kit' has no attribute {name!r}")
    with no_search():
        return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__

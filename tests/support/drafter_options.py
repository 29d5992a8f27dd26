"""Options with which drafters are held against plain decoding, beside their usual ones."""

from typing import Any

from medusa_kit.settings.drafters import BROUGHT_ALONG, DRAFTERS

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "auto": [
        {},
        {"sources": ["medusa", "draft-model", "suffix", "prompt-lookup", "recycling"]},
        {"sources": ["suffix", "draft-model"], "max_nodes": 5},
    ],
    "draft-model": [{}, {"threshold": 0}, {"staged": {"drafter": "suffix"}}],
}
ANYWHERE = [name for name in DRAFTERS if name not in BROUGHT_ALONG]
NAMED = [(name, options) for name in ANYWHERE for options in OPTIONS.get(name, [{}])]

"""Where drafters are registered: a name, and the module below `medusa_kit.drafters` that builds it.

Their options, where they have any, are declared in settings/drafters.py.
"""

REGISTERED = {
    "auto": "mixed.auto",
    "medusa": "heads.choice",
    "draft-model": "draft_model.drafter",
    "prompt-lookup": "text.prompt_lookup",
    "suffix": "text.suffix",
    "recycling": "text.recycling",
    "mtp": "native.mtp",
    "none": "plain",
}
# Drafters that are gone, with what to do.
REMOVED = {
    "combined": "use auto, and max_nodes for num_nodes",
    "lookahead": "use suffix or recycling, which need no training either and gain",
}

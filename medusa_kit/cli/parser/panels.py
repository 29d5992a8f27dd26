"""The panels of every command's help: which option stands where, the most used ones first."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from medusa_kit.settings.sampling import DRAWING, NO_FIELDS, SCORES

MODEL, SPECULATION, SAMPLING, MEMORY = "Model", "Speculation", "Sampling", "Memory"
SERVER, ADVANCED = "Server", "Advanced"
DATA, TRAINING, OUTPUT = "Data", "Training", "Output"
# By the names of parameters, the same in every command.
PANELS: Mapping[str, Sequence[str]] = {
    TRAINING: ("quick", "engine", "hours", "fresh", "nproc", "dry_run"),
    DATA: (
        "prompts", "answers", "statistics", "data", "turns", "limit", "row", "max_length",
        "on_error",
    ),
    MODEL: (
        "model", "config", "dtype", "device", "weights", "activations", "revision", "base_name",
        "base_model",
    ),
    SPECULATION: (
        "heads", "drafter", "drafters", "draft_model", "drafter_options", "fallback", "tree",
        "guesses", "peers", "assistant", "nodes", "sizes", "batch_sizes", "dynamic", "choices",
    ),
    SAMPLING: (
        "system", "max_new_tokens", *DRAWING, "greedy", "stop", *SCORES,
        "json_schema", "regex", "lark", "choice", *NO_FIELDS,
    ),
    SERVER: (
        "host", "port", "served_model_name", "api_key_file", "endpoint", "endpoint_model",
        "endpoint_only", "api_key_env", "concurrency", "arrivals", "rate", "return_token_ids",
        "max_rows", "max_queue", "default_max_tokens", "request_timeout", "heads_dir", "heads_hub",
        "cors_origin", "allowed_hosts", "log_format", "record",
    ),
    MEMORY: ("batch_size", "prefix_cache", "cache", "heads_memory", "layer_by_layer"),
    OUTPUT: (
        "output", "to", "as_json", "verbose", "breakdown", "layout", "private", "license",
        "data_license", "bench", "verify", "clear",
    ),
    ADVANCED: (
        "force", "gpu", "minutes", "only", "goes_on", "tolerance", "check", "attention",
        "fixed_shapes", "compiled", "max_pause", "max_body", "max_connections", "body_timeout",
        "send_timeout", "drain_timeout", "replicas", "max_replicas", "replica_load",
        "replica_threads", "replica_gpus", "ray_address", "install_completion", "show_completion",
        "version", "help",
    ),
}  # fmt: skip
FIRST: Mapping[str, str] = {"serve": SERVER}  # other commands: see `arranged`
# Where a parameter's name means something else in one command.
MOVED: Mapping[tuple[str, str], str] = {
    ("push", "revision"): OUTPUT,
    ("push", "base_model"): OUTPUT,
    ("push", "dry_run"): OUTPUT,
    ("doctor", "dry_run"): ADVANCED,
}
_POSITIONS = {name: (panel, place) for panel, names in PANELS.items()
           for place, name in enumerate(names)}  # fmt: skip


def arranged(command: str, params: Sequence[Any], ctx: Any) -> list[Any]:
    """Parameters in the order of the help: arguments, then panels, required options first.

    The panel of a required option comes first.
    """
    options = [option for option in params if option.param_type_name == "option"]
    for option in options:
        option.rich_help_panel = panel_of(command, option.name)
        option.metavar = shown_kind(option, ctx)
    order = list(PANELS)
    first = {FIRST.get(command)} | {option.rich_help_panel for option in options if option.required}

    def key(option: Any) -> tuple[bool, int, bool, int]:
        panel, (_, position) = option.rich_help_panel, _POSITIONS.get(option.name, (ADVANCED, 0))
        return panel not in first, order.index(panel), not option.required, position

    return [option for option in params if option not in options] + sorted(options, key=key)


def shown_kind(option: Any, ctx: Any) -> str:
    """What stands between an option and its help: nothing for a flag, else the kind of value."""
    if option.is_flag:
        return ""
    kind = getattr(option, "display_type_rich", None) or option.make_metavar  # before Typer 0.29
    shown = option.metavar or kind(ctx=ctx) or ""
    return re.sub(r"list\[(.*)\]", r"\1", re.sub(" range", "", shown, flags=re.IGNORECASE))


def panel_of(command: str, name: str) -> str:
    """Where an option stands; a name that no panel has is among the advanced ones."""
    return MOVED.get((command, name)) or _POSITIONS.get(name, (ADVANCED, 0))[0]

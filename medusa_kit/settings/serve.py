"""Every option of the server, defined once: name, type, default and description.

`medusa-kit serve` and the section `serve` of engine files are made from it. Nothing is imported
here but the standard library, since `--help` is made from it.
"""

import dataclasses
from typing import Annotated, Any, get_args, get_type_hints

from medusa_kit.errors import ConfigError, check_count, is_finite
from medusa_kit.settings.sampling import ANSWER_TOKENS
from medusa_kit.settings.serve_limits import LimitOptions
from medusa_kit.settings.serve_replicas import ReplicaOptions

RECORD_MIB = 256  # some twenty million tokens, more than heads are trained on


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig(LimitOptions, ReplicaOptions):
    """How requests are served. Raises ConfigError for a value that is out of range."""

    host: Annotated[str, "Address to listen on; 0.0.0.0 is every address of this machine."] = (
        "127.0.0.1"
    )
    port: Annotated[int, "Port to listen on; 0 takes a free one."] = 8000
    served_model_name: Annotated[
        list[str] | None,
        "Name by which requests may ask for the model too; may be repeated, and the first is the "
        "one in answers of /v1/models; default: the model's own name alone.",
    ] = None
    max_rows: Annotated[int, "Requests decoded at once, in one batch."] = 8
    max_queue: Annotated[int, "Requests that may wait for a slot; others get 429."] = 256
    max_pause: Annotated[
        float,
        "Seconds for which prefill may hold up running answers between two steps.",
    ] = 0.1
    default_max_tokens: Annotated[
        int, "Longest answer, in tokens, of a chat request that does not give max_tokens."
    ] = ANSWER_TOKENS
    request_timeout: Annotated[
        float, "Seconds that a request may take, the wait for a slot included; then it gets 504."
    ] = 600.0
    drain_timeout: Annotated[
        float, "Seconds that running answers may take at the end (SIGTERM, Ctrl-C)."
    ] = 60.0

    heads_dir: Annotated[
        str | None,
        "Folder whose subfolders hold heads that requests may name: model BASE:SUBFOLDER.",
    ] = None
    heads_hub: Annotated[
        list[str] | None,
        "Heads on the Hub that requests may name, ORG/NAME or ORG/NAME@REVISION; may be repeated.",
    ] = None
    heads_memory: Annotated[
        float, "Gigabytes of memory for heads that requests name; those used longest ago go first."
    ] = 1.0

    record: Annotated[
        str | None,
        "File that prompts and answers are added to, as token ids, for train --quick --from, until "
        f"it has {RECORD_MIB} MiB; default: nothing is recorded.",
    ] = None

    def names_of(self, own: str) -> list[str]:
        """The names by which requests may ask for the model whose own name this is."""
        return list(dict.fromkeys((*(self.served_model_name or ()), own)))

    @property
    def heads_bytes(self) -> int:
        return int(self.heads_memory * 1e9)

    def __post_init__(self) -> None:
        LimitOptions.__post_init__(self)
        ReplicaOptions.__post_init__(self)
        for name in ("max_rows", "default_max_tokens"):
            check_count(name, getattr(self, name))
        for name in self.served_model_name or ():
            _check(
                "served_model_name", name, isinstance(name, str) and bool(name.strip()), "a name"
            )
        _check("port", self.port, whole(self.port) and 0 <= self.port < 65536, "0 to 65535")
        _check(
            "max_queue", self.max_queue, whole(self.max_queue) and self.max_queue >= 0, "0 or more"
        )
        memory = self.heads_memory
        _check("heads_memory", memory, is_finite(memory) and memory > 0, "gigabytes above 0")
        for name in ("max_pause", "request_timeout"):
            value = getattr(self, name)
            _check(name, value, is_finite(value) and value > 0, "seconds above 0")
        if self.record is not None and self.replicas is not None:
            raise ConfigError(
                "record does not go with replicas, which would all write to one file",
                hint="record on one server without replicas",
            )
        drain = self.drain_timeout
        _check("drain_timeout", drain, is_finite(drain) and drain >= 0, "seconds, 0 or more")
        if not isinstance(self.host, str) or not self.host.strip():
            raise ConfigError(f"host {self.host!r} is empty", hint="127.0.0.1 is this machine")


@dataclasses.dataclass(frozen=True)
class ServeOption:
    """One option as the command line and engine files see it."""

    name: str
    kind: Any
    default: Any
    description: str


def serve_options() -> dict[str, ServeOption]:
    """The options of ServeConfig by name."""
    hints = get_type_hints(ServeConfig, include_extras=True)
    return {
        option.name: ServeOption(option.name, *_kind(hints[option.name], option.default))
        for option in dataclasses.fields(ServeConfig)
    }


def _kind(hint: Any, default: Any) -> tuple[Any, Any, str]:
    kind, description = get_args(hint)
    return kind, default, description


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: Any, fits: bool, expected: str) -> None:
    if not fits:
        raise ConfigError(f"{name} {value!r} is out of range; expected {expected}")

"""Every option of the server, defined once: name, type, default and description.

`medusa-kit serve` and the section `serve` of engine files are made from it. Nothing is imported
here but the standard library, since `--help` is made from it.
"""

import dataclasses
from typing import Annotated

from medusa_kit.errors import ConfigError
from medusa_kit.settings.option import COUNT, SECONDS, Allowed
from medusa_kit.settings.sampling import ANSWER_TOKENS
from medusa_kit.settings.serve_limits import LimitOptions
from medusa_kit.settings.serve_replicas import ReplicaOptions

RECORD_MIB = 256  # some twenty million tokens, more than heads are trained on
PORT = Allowed("0 to 65535", lambda port: 0 <= port < 65536)
QUEUE = Allowed("0 or more", lambda size: size >= 0)
MEMORY = Allowed("gigabytes above 0", lambda size: size > 0)
DRAIN = Allowed("seconds, 0 or more", lambda seconds: seconds >= 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig(LimitOptions, ReplicaOptions):
    """How requests are served. Raises ConfigError for a value that is out of range."""

    host: Annotated[str, "Address to listen on; 0.0.0.0 is every address of this machine."] = (
        "127.0.0.1"
    )
    port: Annotated[int, "Port to listen on; 0 takes a free one.", PORT] = 8000
    served_model_name: Annotated[
        list[str] | None,
        "Name by which requests may ask for the model too; may be repeated, and the first is the "
        "one in answers of /v1/models; default: the model's own name alone.",
    ] = None
    max_rows: Annotated[int, "Requests decoded at once, in one batch.", COUNT] = 8
    max_queue: Annotated[int, "Requests that may wait for a slot; others get 429.", QUEUE] = 256
    max_pause: Annotated[
        float,
        "Seconds for which prefill may hold up running answers between two steps.",
        SECONDS,
    ] = 0.1
    default_max_tokens: Annotated[
        int, "Longest answer, in tokens, of a chat request that does not give max_tokens.", COUNT
    ] = ANSWER_TOKENS
    request_timeout: Annotated[
        float,
        "Seconds that a request may take, the wait for a slot included; then it gets 504.",
        SECONDS,
    ] = 600.0
    drain_timeout: Annotated[
        float, "Seconds that running answers may take at the end (SIGTERM, Ctrl-C).", DRAIN
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
        float,
        "Gigabytes of memory for heads that requests name; those used longest ago go first.",
        MEMORY,
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
        LimitOptions.__post_init__(self)  # which checks each field
        ReplicaOptions.__post_init__(self)
        if self.record is not None and self.replicas is not None:
            raise ConfigError(
                "record does not go with replicas, which would all write to one file",
                hint="record on one server without replicas",
            )

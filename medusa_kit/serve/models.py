"""The `model` of a request: BASE, or BASE:HEADS for heads by name.

LoRAX's `adapter_id` names heads, too (it serves Medusa heads as adapters).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from medusa_kit.background import in_background
from medusa_kit.base.model import BaseModelInfo
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_store import HeadsStatus, HeadsStore
from medusa_kit.errors import ConfigError, UnknownModelError, did_you_mean, unknown_value
from medusa_kit.heads.checkpoint import PAIRED_FOLDER
from medusa_kit.infer.decode.accept.default_sampling import with_defaults
from medusa_kit.paths import expanded
from medusa_kit.shown import shown

ADAPTER_SOURCES = ("local", "hub")  # LoRAX has more
OWNER = "medusa-kit"


def base_name(info: BaseModelInfo) -> str:
    """The name of a base for clients: of one in a folder or a file, without the path to it."""
    if info.source in ("hub", "embedded", "debug", "memory"):
        return info.name
    return _last_part(Path(info.name)) or info.source


def heads_name(source: str) -> str:
    """The name of the server's own heads for clients. Those of the Hub are in its cache, under
    their id."""
    folder = Path(source).absolute()
    cached = folder.parent.parent.name
    if folder.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/")
    return _last_part(folder.parent if folder.name == PAIRED_FOLDER else folder) or "heads"


def own_heads(engine: Engine) -> str | None:
    """The name of the heads that the server was started with, if they lie in a folder."""
    return None if engine.heads_source is None else heads_name(engine.heads_source)


def _last_part(path: Path) -> str:
    """The last part of a path; of `.` and `..` the name of the folder that they stand for."""
    return (path if path.name not in ("", "..") else expanded(path).resolve()).name


@dataclass(frozen=True)
class RequestedModel:
    """The model that a request names. `name`: as an answer repeats it. `heads`: for
    `HeadsStore.load`; None: the server's own."""

    name: str
    heads: str | None = None


class ModelNames(Protocol):
    """Which names a request's `model` may have."""

    def entries(self) -> list[dict[str, Any]]:
        """For GET /v1/models."""
        ...

    def entry(self, model: str) -> dict[str, Any]:
        """The entry of one model. Raises UnknownModelError."""
        ...

    def requested(self, model: str, adapter_id: str | None, source: str | None) -> RequestedModel:
        """The model that these fields of a request name. Raises UnknownModelError, ConfigError."""
        ...

    async def ready(
        self, model: str, adapter_id: str | None, source: str | None
    ) -> Mapping[str, Any]:
        """Keywords of `SharedBatch.submit`, once heads are loaded. Raises what `requested` and
        `HeadsStore.load` do."""
        ...


class ServedModels:
    """`names`: of the base model, the first one being that of /v1/models. `store`: of heads that
    requests may name. `created`: when the server began, in seconds."""

    def __init__(
        self, engine: Engine, names: Sequence[str], store: HeadsStore | None, created: int
    ) -> None:
        self._engine, self.names, self._store = engine, tuple(names), store
        self._created = created
        chosen, _ = with_defaults({}, engine.base.generation_config)
        self._temperature = chosen["temperature"]  # of a request that gives none

    def requested(
        self,
        model: str | None,
        adapter_id: str | None = None,
        adapter_source: str | None = None,
    ) -> RequestedModel:
        """What a request asks for. Without a model it is the base, as for LoRAX. Whether there are
        such heads is told by the store.

        Raises UnknownModelError, and ConfigError where the fields contradict each other.
        """
        base, heads = self._split(self.names[0] if model is None else model)
        if adapter_source is not None:
            self._check_source(adapter_id, adapter_source)
        if adapter_id is not None:
            if heads not in (None, adapter_id):
                raise ConfigError(
                    f"adapter_id {adapter_id!r} and model {model!r} name different heads",
                    hint="give one of them",
                )
            heads = adapter_id
        if heads is None:
            return RequestedModel(base)
        if self._is_own(heads):
            return RequestedModel(f"{base}:{heads}")
        if self._store is None:
            raise UnknownModelError(
                f"there are no heads {shown(heads)} here: requests may name none",
                hint="GET /v1/models lists all",
            )
        return RequestedModel(f"{base}:{heads}", heads)

    def options(
        self,
        model: str | None,
        adapter_id: str | None = None,
        adapter_source: str | None = None,
    ) -> dict[str, Any]:
        """Keywords of `SharedBatch.submit` for such a request, which hold its heads while they are
        kept. Waits until heads are loaded. Raises what `requested` and `HeadsStore.load` do."""
        heads = self.requested(model, adapter_id, adapter_source).heads
        return {} if heads is None or self._store is None else {"heads": self._store.get(heads)}

    async def ready(
        self,
        model: str | None,
        adapter_id: str | None = None,
        adapter_source: str | None = None,
    ) -> dict[str, Any]:
        """Keywords of `SharedBatch.submit`, as `options` gives them, for async callers, whose loop
        goes on meanwhile."""
        heads = self.requested(model, adapter_id, adapter_source).heads
        if heads is None or self._store is None:
            return {}
        queued = in_background(self._store.load, heads)
        loading = await asyncio.wrap_future(queued)
        return {"heads": await asyncio.wrap_future(loading)}

    def listed(self) -> list[str]:
        """The names of `entries`."""
        return [str(entry["id"]) for entry in self.entries()]

    def entries(self) -> list[dict[str, Any]]:
        """The models of GET /v1/models: the base, then the base with each of the named heads."""
        heads, base = self._engine.heads, self.names[0]
        details = {
            "state": "loaded",
            "heads": own_heads(self._engine),
            "kind": None if heads is None else heads.config.kind,
            "num_heads": None if heads is None else heads.num_heads,
            "bytes": 0 if heads is None else heads.num_bytes,
            "in_use": True,
            "temperature": self._temperature,
        }
        statuses = [] if self._store is None else self._store.statuses()
        named = [self._entry(f"{base}:{status.name}", _details_of(status)) for status in statuses]
        return [self._entry(base, details), *named]

    def entry(self, model: str) -> dict[str, Any]:
        """The model of GET /v1/models/MODEL. Raises UnknownModelError."""
        _, heads = self._split(model)
        own = heads is None or self._is_own(heads)
        name = self.names[0] if own else f"{self.names[0]}:{heads}"
        for entry in self.entries():
            if entry["id"] == name:
                return entry
        raise self._unknown(model)

    def _is_own(self, heads: str) -> bool:
        """Whether it names the heads of every request that names none, and no others."""
        if heads != own_heads(self._engine):
            return False
        return self._store is None or heads not in self._store.folder.names()

    def _split(self, model: str) -> tuple[str, str | None]:
        """(base, heads). Of several names that fit, the longest counts: names may hold colons."""
        for base in sorted(self.names, key=len, reverse=True):
            if model == base:
                return base, None
            if model.startswith(f"{base}:") and len(model) > len(base) + 1:
                return base, model[len(base) + 1 :]
        raise self._unknown(model)

    def _check_source(self, adapter_id: str | None, source: str) -> None:
        if adapter_id is None:
            raise ConfigError(
                f"adapter_source {source!r} comes without an adapter_id", hint="leave it out"
            )
        if source not in ADAPTER_SOURCES:
            raise unknown_value("adapter_source", source, ADAPTER_SOURCES)
        on_hub = self._store is not None and adapter_id in self._store.folder.hub_ids
        if on_hub != (source == "hub"):
            raise UnknownModelError(
                f"there are no heads {shown(adapter_id)} from {source} here",
                hint="leave adapter_source out",
            )

    def _unknown(self, model: str) -> UnknownModelError:
        named = "" if self._store is None else f", or {self.names[0]}:HEADS"
        return UnknownModelError(
            f"model {shown(model)} is not served here; expected {self.names[0]}{named}",
            hint=did_you_mean(model, self.names, "GET /v1/models lists all"),
        )

    def _entry(self, name: str, details: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": OWNER,
            "medusa_kit": details,
        }


def _details_of(status: HeadsStatus) -> dict[str, Any]:
    return {
        "state": status.state,
        "heads": status.name,
        "kind": status.kind,
        "num_heads": status.num_heads,
        "bytes": status.num_bytes,
        "in_use": status.in_use,
    }

"""Heads by name for one base model, loaded when they are asked for, in the background.

Those used longest ago are dropped where memory is short, but none that a request still uses.
Requests whose heads are deleted or replaced meanwhile go on with what they have.
"""

import contextlib
import itertools
import threading
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from medusa_kit.background import in_background
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_folder import HeadsFolder, HeadsLocation
from medusa_kit.engine.heads_reading import (
    drafting_with_heads,
    explained,
    heads_inside,
    read_heads,
)
from medusa_kit.errors import (
    CheckpointError,
    ClosedError,
    DeviceMemoryError,
    Live,
    MedusaKitError,
    QueueFullError,
)
from medusa_kit.heads.checkpoint import WEIGHTS_NAME, read_config, says_ours
from medusa_kit.locks import SharedLock

MAX_BYTES = 1 << 30
LOADERS = 4  # heads loaded at the same time, downloads included
STUCK = 30.0  # seconds after which one that takes a loader's place no longer holds up others
ATTEMPTS = 3  # to read a folder that changes meanwhile
_numbers = itertools.count(1)


@dataclass(eq=False)
class LoadedHeads:
    """Heads in memory, in an engine around the common base model."""

    location: HeadsLocation
    engine: Engine
    num_bytes: int
    number: int = field(default_factory=lambda: next(_numbers))
    holders: set[int] = field(default_factory=set)


class HeadsLease(Live):
    """Heads in use: they are not dropped before this has been closed. Use it in `with`."""

    def __init__(self, loaded: LoadedHeads) -> None:
        self._loaded = loaded
        # A set, since adding and removing takes no lock: garbage may be collected anywhere.
        loaded.holders.add(id(self))

    @property
    def name(self) -> str:
        return self._loaded.location.name

    @property
    def engine(self) -> Engine:
        return self._loaded.engine

    @property
    def number(self) -> int:
        """A number that no other heads have, nor these loaded anew."""
        return self._loaded.number

    def clone(self) -> "HeadsLease":
        """Another lease: the heads stay in use until that has been closed, too."""
        return HeadsLease(self._loaded)

    def close(self) -> None:
        self._loaded.holders.discard(id(self))

    def __enter__(self) -> "HeadsLease":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True)
class HeadsStatus:
    """What is known of heads by their name. Kind and number are None until they have been
    downloaded, or converted from another format."""

    name: str
    state: Literal["loaded", "loading", "available"]
    kind: str | None = None
    num_heads: int | None = None
    num_bytes: int = 0  # of memory
    in_use: bool = False


class HeadsStore(Live):
    """Every method may be called in any thread.

    `folder`: its subfolders hold heads, named by their own names; None: there are none.
    `allowed_hub_ids`: ORG/NAME or ORG/NAME@REVISION of heads that may be downloaded.
    `most_bytes`: of memory for loaded heads; those being loaded come on top.
    Raises ConfigError, UsageError.
    """

    def __init__(
        self,
        engine: Engine,
        folder: str | Path | None,
        allowed_hub_ids: Collection[str] = (),
        most_bytes: int = MAX_BYTES,
    ) -> None:
        self.engine, self.most_bytes = drafting_with_heads(engine), most_bytes
        self.folder = HeadsFolder(folder, allowed_hub_ids)
        self._lock = SharedLock()  # for what follows
        self._loaded: dict[str, LoadedHeads] = {}  # the one used longest ago first
        self._replaced: list[LoadedHeads] = []  # which rows still use
        self._waiting: dict[HeadsLocation, list[Future[HeadsLease]]] = {}
        self._closed = False
        self._loaders = threading.Semaphore(LOADERS)

    def load(self, name: str) -> "Future[HeadsLease]":
        """Heads to be used and then closed, at once or when they have been loaded; those who ask
        meanwhile wait for the same. An async caller waits by `asyncio.wrap_future`.

        The future raises CheckpointError, IncompatibleBaseError (heads of another base),
        TreeError, DeviceMemoryError (heads larger than the cap), QueueFullError (heads in use leave
        no room for these). Raises at once UnknownModelError, ClosedError, and for a folder with
        links or an adapter what `HeadsFolder.find` raises.
        """
        location = self._find(name)
        future: Future[HeadsLease] = Future()
        with self._lock:
            if self._closed:
                raise ClosedError("the heads' store has been closed", hint="make another one")
            loaded = self._current(location)
            if loaded is not None:
                self._loaded[name] = self._loaded.pop(name)
                future.set_result(HeadsLease(loaded))
                return future
            waiting = self._waiting.setdefault(location, [])
            waiting.append(future)
            if len(waiting) == 1:
                in_background(self._load_in_turn, location)
        return future

    def get(self, name: str) -> HeadsLease:
        """Wait for the heads that `load` gives."""
        return self.load(name).result()

    def statuses(self) -> list[HeadsStatus]:
        """The status of all heads that may be requested."""
        names = self.folder.names()
        with self._lock:
            loaded = dict(self._loaded)
            loading = {location.name for location in self._waiting}
        return [self._status(name, loaded.get(name), name in loading) for name in names]

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that loaded heads take, those included that are deleted but in use."""
        with self._lock:
            self._replaced = [loaded for loaded in self._replaced if loaded.holders]
            return sum(loaded.num_bytes for loaded in (*self._loaded.values(), *self._replaced))

    @property
    def num_loaded(self) -> int:
        """How many of the names have their heads in memory."""
        return len(self._loaded)

    def close(self) -> None:
        """Load no more heads; those who wait get ClosedError. Heads in use stay in use."""
        with self._lock:
            self._closed = True
            unanswered = [future for waiting in self._waiting.values() for future in waiting]
            self._waiting.clear()
            self._loaded.clear()
        for future in unanswered:
            if future.set_running_or_notify_cancel():
                future.set_exception(ClosedError("the heads' store has been closed"))

    def __enter__(self) -> "HeadsStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, name: str) -> HeadsLocation:
        try:
            return self.folder.find(name)
        except MedusaKitError:
            with self._lock:
                self._drop(name)  # what was there is there no more
            raise

    def _current(self, location: HeadsLocation) -> LoadedHeads | None:
        """The loaded heads, unless their folder has changed since."""
        loaded = self._loaded.get(location.name)
        if loaded is not None and loaded.location != location:
            self._drop(location.name)
            return None
        return loaded

    def _drop(self, name: str) -> None:
        loaded = self._loaded.pop(name, None)
        if loaded is not None and loaded.holders:
            self._replaced.append(loaded)

    def _load_in_turn(self, location: HeadsLocation) -> None:
        """Load the heads, in a thread of its own, which a slow disk may keep for ever."""
        has_turn = self._loaders.acquire(timeout=STUCK)
        try:
            if not self._closed:
                self._load(location)
        finally:
            if has_turn:
                self._loaders.release()

    def _load(self, location: HeadsLocation) -> None:
        loaded: LoadedHeads | None = None
        error: MedusaKitError | None = None
        try:
            loaded = self._read(location)
        except Exception as raised:
            error = explained(raised, location)
        with self._lock:
            waiting = self._waiting.pop(location, [])
            if loaded is not None and waiting:
                try:
                    self._keep(loaded)
                except MedusaKitError as raised:
                    loaded, error = None, raised
            leases = [] if loaded is None else [HeadsLease(loaded) for _ in waiting]
        for index, future in enumerate(waiting):
            if not future.set_running_or_notify_cancel():  # nobody waits any more
                continue
            if error is None:
                future.set_result(leases[index])
            else:
                future.set_exception(type(error)(error.message, hint=error.hint))

    def _read(self, location: HeadsLocation) -> LoadedHeads:
        name = location.name
        for _ in range(ATTEMPTS):
            folder = location.fetched()
            self._check_file_size(name, folder)
            engine, size = read_heads(self.engine, folder, name)
            current = self.folder.find(name)
            if current == location:
                return LoadedHeads(location, engine, size)
            location = current
        raise CheckpointError(
            f"heads {name!r} change while they are read",
            hint="write them under another name, and rename the folder when it is complete",
        )

    def _check_file_size(self, name: str, folder: Path) -> None:
        """Heads that can never be kept are not read."""
        path = folder / WEIGHTS_NAME  # files of other formats may hold the base model, too
        size = path.stat().st_size if path.is_file() else 0
        if size > 4 * self.most_bytes:  # 4: float64 weights for a base in 16 bits
            raise self._too_large(name, size)

    def _too_large(self, name: str, size: int) -> DeviceMemoryError:
        return DeviceMemoryError(
            f"heads {name!r} take {size} bytes; at most {self.most_bytes} are kept for heads",
            hint="let heads take more memory: --heads-memory GIGABYTES",
        )

    def _keep(self, loaded: LoadedHeads) -> None:
        """Drop others, those used longest ago first, until these fit. Raises DeviceMemoryError,
        QueueFullError."""
        name, size = loaded.location.name, loaded.num_bytes
        if size > self.most_bytes:
            raise self._too_large(name, size)
        self._drop(name)
        for other in list(self._loaded.values()):
            if self.num_bytes + size <= self.most_bytes:
                break
            if not other.holders:
                del self._loaded[other.location.name]
        if (used := self.num_bytes) + size > self.most_bytes:
            raise QueueFullError(
                f"heads {name!r} take {size} bytes, and heads in use {used} of {self.most_bytes}",
                hint="ask again later, or let heads take more memory: --heads-memory GIGABYTES",
            )
        self._loaded[name] = loaded

    def _status(self, name: str, loaded: LoadedHeads | None, loading: bool) -> HeadsStatus:
        if loaded is not None:
            heads = loaded.engine.heads
            assert heads is not None
            kind, count = heads.config.kind, heads.num_heads
            return HeadsStatus(name, "loaded", kind, count, loaded.num_bytes, bool(loaded.holders))
        state: Literal["loading", "available"] = "loading" if loading else "available"
        with contextlib.suppress(MedusaKitError):  # told to those who ask for them
            folder = self.folder.find(name).folder
            if folder is not None and says_ours(inside := heads_inside(folder)):
                config = read_config(inside)
                return HeadsStatus(name, state, config.kind, config.num_heads)
        return HeadsStatus(name, state)

"""A child process that looks at grammars. Each is tried in a fork of it, with limits that the
kernel keeps: the processor's time, the clock's, memory. A fork that meets one dies, and nothing
else does.

It reads tasks from stdin and answers on stdout, one after the other, until stdin ends. No torch is
imported here, so that it starts fast and is small.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import struct
import sys
from pathlib import Path
from typing import IO, Any, NamedTuple

from medusa_kit.errors import ConfigError
from medusa_kit.infer.decode.grammars.source import begun_fault_of, refused
from medusa_kit.serve.calls.tools import Constraint, constraint_of
from medusa_kit.settings.grammar import Grammar

KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG
LENGTH = struct.Struct("!Q")


class Budget(NamedTuple):
    """`seconds` of the processor, `wall` of the clock; `num_bytes` of memory more than before."""

    seconds: float
    wall: float
    num_bytes: int


class Answer(NamedTuple):
    """`kind`: found, refused, nested, failed; or what was over the budget: time, wall, memory."""

    kind: str
    value: Any = None
    hint: str | None = None


def send(stream: IO[bytes], value: Any) -> None:
    """Write a value to a stream. Raises OSError where nobody reads."""
    data = pickle.dumps(value)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next value of a stream; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    data = stream.read(length := LENGTH.unpack(head)[0])
    return pickle.loads(data) if len(data) == length else None


def look_at(fields: tuple[Any, ...]) -> Answer:
    """What `constraint_of` makes of the fields of a request, once its grammar has been begun."""
    try:
        constraint = constraint_of(*fields)
        grammar = constraint.grammar
        if grammar is not None and (fault := begun_fault_of(grammar)) is not None:
            raise refused(grammar, fault)
        # What is shown is the request's own, and need not come back.
        return Answer(
            "found", (grammar, bool(constraint.tools), constraint.notes, constraint.values)
        )
    except ConfigError as error:
        return Answer("refused", error.message, error.hint)
    except RecursionError:
        return Answer("nested")
    except MemoryError:
        return Answer("memory")
    except BaseException as error:  # a panic of llguidance is no Exception
        return Answer("failed", f"{type(error).__name__}: {error}")


def _tried(fields: tuple[Any, ...], budget: Budget, libc: Any) -> Answer:
    """Look at a request's fields within a budget; called in a fork."""
    import resource  # Windows has none of this

    if libc is not None:
        libc.prctl(KILL_WITH_PARENT, signal.SIGKILL)
    before, addresses = _resident(), _resident(0)
    signal.setitimer(signal.ITIMER_PROF, budget.seconds)
    signal.setitimer(signal.ITIMER_REAL, budget.wall)
    if addresses is not None:  # twice, since some of it is never touched
        max_addresses = addresses + 2 * budget.num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (max_addresses, max_addresses))
    answer = look_at(fields)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return Answer("memory") if before and used - before > budget.num_bytes else answer


def _resident(field: int = 1) -> int | None:
    """Bytes in memory, or of addresses (field 0); None where the system does not say."""
    try:
        sizes = Path("/proc/self/statm").read_text().split()
        return int(sizes[field]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _ended_by(status: int) -> Answer:
    """Why a fork has not answered."""
    by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if by == signal.SIGPROF:
        return Answer("time")
    if by == signal.SIGALRM:
        return Answer("wall")
    if by == signal.SIGSEGV:  # of the stack
        return Answer("nested")
    return Answer("memory")  # Rust aborts


def main() -> None:
    import resource

    inlet, outlet = sys.stdin.buffer, sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for signum in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C is the server's
        signal.signal(signum, signal.SIG_IGN)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    with contextlib.suppress(ConfigError):  # those who ask get it as an answer
        begun_fault_of(Grammar.json_schema({"type": "string"}))  # imports what forks need
    gc.freeze()
    while (task := receive(inlet)) is not None:
        fields, budget = task
        child = os.fork()
        if child == 0:
            try:
                send(outlet, _tried(fields, budget, libc))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            send(outlet, _ended_by(status))


def constraint_from(
    value: tuple[Grammar | None, bool, tuple[str, ...], Any], tools: Any
) -> Constraint:
    grammar, calls, notes, values = value
    return Constraint(grammar, list(tools) if calls else (), notes, values=values)


if __name__ == "__main__":
    main()

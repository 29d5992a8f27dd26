"""A server that is attacked while others read their streams: do these notice?

Each attack runs beside streaming clients and probes of /health, after a control run without it, and
goes on while the server gets SIGTERM.

python benchmarks/hostile.py [ATTACK ...] [--seconds 15] [--clients 8] [--model NAME]

Prints a table; exit status 1 where a limit is broken. A new attack is a function in ATTACKS, which
is called again and again by several threads.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from served_process import _url, tail

MODEL = "smollm2-135m-instruct"
DRAIN = 5.0  # seconds
# More than without the attack, in seconds; of memory in bytes.
MAX_GAP, MAX_HEALTH, MAX_MEMORY, MAX_END = 0.5, 0.5, 500_000_000, DRAIN + 5
LETTERS = "abcdefghijklmnopqrstuvwxyzABCD"
SCHEMAS_OF = 6  # threads of an attack
PROBE = 0.1  # seconds between two looks

_numbers = itertools.count(int(time.time()))


def ask(url, path, body, timeout=60):
    """(status, seconds, body); status None where there was no answer."""
    place, began = urlsplit(url), time.perf_counter()
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=timeout)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(
            "GET" if body is None else "POST", path, sent, {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        return answer.status, time.perf_counter() - began, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return None, time.perf_counter() - began, repr(error).encode()
    finally:
        connection.close()


def with_schema(url, schema):
    """A chat of one token under a schema that no earlier one is the same as."""
    schema = {"title": f"number {next(_numbers)}", **schema}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    said = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    return ask(url, "/v1/chat/completions", {**said, "response_format": form})[0]


def patterns(url):
    """30 patterns that one text has to fit: gigabytes, if anybody tried."""
    all_of = [{"type": "string", "pattern": f".*{letter}.*"} for letter in LETTERS]
    return with_schema(url, {"type": "string", "allOf": all_of})


def formats(url):
    """What no count of patterns can see: each of many texts has a format and a pattern."""
    pattern = [".*".join(["", *some, ""]) for some in itertools.product(LETTERS[:8], repeat=3)]
    texts = [{"type": "string", "format": "uri", "pattern": one} for one in pattern]
    return with_schema(url, {"anyOf": texts})


def references(url):
    """Each reference is to two of the next: 2^25 in all."""
    parts = {f"d{n}": {"allOf": 2 * [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(25)}
    return with_schema(url, {"$ref": "#/$defs/d0", "$defs": {**parts, "d25": {"type": "string"}}})


def properties(url):
    """5,000 properties in a row."""
    named = {f"p{n}": {"type": "integer"} for n in range(5000)}
    return with_schema(url, {"type": "object", "properties": named})


def constants(url):
    """A text of a megabyte that has to follow at once."""
    return with_schema(url, {"const": f"{next(_numbers)} ab " * 60_000})


def later_constants(url):
    """The same behind a number, so that it is met in the middle of an answer."""
    rest = {"const": f"{next(_numbers)} ab " * 8_000}
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": rest},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    said = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 40}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return ask(url, "/v1/chat/completions", {**said, "response_format": form})[0]


ATTACKS = {
    one.__name__.replace("_", "-"): one
    for one in (patterns, formats, references, properties, constants, later_constants)
}


class Working:
    """Threads that work inside the context."""

    def __init__(self, *works):
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work, args=args) for work, *args in works]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()


class Streams(Working):
    """Clients that read one answer after the other. `gaps`: seconds between two pieces of each."""

    def __init__(self, url, number):
        self.url, self.gaps, self.wrong = url, [], []
        super().__init__(*((self._read, n) for n in range(number)))

    def _read(self, number):
        while not self._stop.is_set():
            try:
                self._read_one(number)
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(repr(error))
                time.sleep(PROBE)

    def _read_one(self, number):
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
        body = {
            "model": MODEL, "stream": True, "max_tokens": 200, "temperature": 0,
            "messages": [{"role": "user", "content": f"Tell me a story of {number} rivers."}],
        }  # fmt: skip
        connection.request("POST", "/v1/chat/completions", json.dumps(body),
                           {"Content-Type": "application/json"})  # fmt: skip
        with contextlib.closing(connection), connection.getresponse() as answer:
            if answer.status != 200:
                self.wrong.append(f"{answer.status} {answer.read()[:200]}")
                time.sleep(PROBE)
                return
            before = None
            while (line := answer.readline()) and not self._stop.is_set():
                if not line.startswith(b"data: {"):
                    continue
                if b'"error"' in line:
                    self.wrong.append(line.decode()[:200])
                now = time.perf_counter()
                if before is not None:
                    self.gaps.append(now - before)
                before = now


class Probes(Working):
    """What /health takes, a usual schema, and the memory of all processes."""

    def __init__(self, url, process):
        self.url, self.process = url, psutil.Process(process.pid)
        self.health, self.usual, self.memory, self.wrong = [], [], [], []
        looks = (self._health, self._usual, self._memory)
        super().__init__(*((self._repeat, look) for look in looks))

    def _repeat(self, look):
        while not self._stop.wait(PROBE):
            look()

    def _health(self):
        status, seconds, said = ask(self.url, "/health", None)
        self.health.append(seconds)
        if status != 200:
            self.wrong.append(f"/health {status} {said[:100]}")

    def _usual(self):
        """One that nobody has sent before, refused behind the look at it: no place is needed."""
        names = {f"name {next(_numbers)}": {"type": "string"}, "age": {"type": "integer"}}
        form = {
            "type": "json_schema",
            "json_schema": {
                "name": "a",
                "schema": {"type": "object", "properties": names, "required": ["age"]},
            },
        }
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 10**9, "response_format": form}  # fmt: skip
        status, seconds, said = ask(self.url, "/v1/chat/completions", body)
        self.usual.append(seconds)
        if status != 400 or b"context" not in said:
            self.wrong.append(f"a usual schema {status} {said[:200]}")

    def _memory(self):
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [self.process, *self.process.children(recursive=True)]
            self.memory.append(sum(_resident(one) for one in family))


def _resident(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.memory_info().rss
    return 0


class Attackers:
    def __init__(self, attack, url, number):
        self.statuses, self._stop = {}, threading.Event()
        self._attack, self._url = attack, url
        self._threads = [threading.Thread(target=self._go_on, daemon=True) for _ in range(number)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()

    def _go_on(self):
        while not self._stop.is_set():
            status = self._attack(self._url)
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if status in (None, 503):
                time.sleep(PROBE)


def measured(url, process, given, attack=None):
    """(streams, probes, statuses of the attack) of some seconds."""
    attackers = contextlib.nullcontext() if attack is None else Attackers(attack, url, SCHEMAS_OF)
    with Streams(url, given.clients) as streams:
        time.sleep(1)
        with Probes(url, process) as probes, attackers as running:
            time.sleep(given.seconds)
    return streams, probes, {} if running is None else running.statuses


def row(name, streams, probes, statuses=None, ended=None):
    told = {
        "attack": name,
        "gap": f"{max(streams.gaps):.2f}",
        "median": f"{statistics.median(streams.gaps):.3f}",
        "health": f"{max(probes.health):.2f}",
        "schema": f"{max(probes.usual):.2f}",
        "MB": f"{max(probes.memory) / 1e6:.0f}",
        "end": "" if ended is None else f"{ended:.1f}",
        "statuses": " ".join(f"{status}:{n}" for status, n in (statuses or {}).items()),
    }
    print("  ".join(f"{value:>15}" if key == "attack" else f"{value:>8}"
                    for key, value in told.items()), flush=True)  # fmt: skip


def attacked(name, given):
    """What is wrong with the server under this attack."""
    slots = str(given.clients + SCHEMAS_OF)  # enough: a gap is no wait for one
    command = [
        sys.executable,
        "-m",
        "medusa_kit",
        "serve",
        "--model",
        given.model,
        "--port",
        "0",
        "--drain-timeout",
        str(DRAIN),
        "--log-format",
        "none",
        "--max-rows",
        slots,
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen(command, stderr=stderr)
        try:
            url = _url(process, log)
            ask(url, "/v1/models", None)
            measured(url, process, argparse.Namespace(clients=given.clients, seconds=3))
            control = measured(url, process, given)
            row("none", *control)
            under = measured(url, process, given, ATTACKS[name])
            with Attackers(ATTACKS[name], url, SCHEMAS_OF):
                time.sleep(1)
                family = psutil.Process(process.pid).children(recursive=True)
                began = time.perf_counter()
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(3 * MAX_END)
                ended = time.perf_counter() - began
            row(name, *under, ended=ended)
            _, left = psutil.wait_procs(family, timeout=2)
            return list(faults(name, control, under, ended, process.returncode, left))
        finally:
            process.kill()
            process.wait()
            if given.log:
                print(tail(log))


def faults(name, control, under, ended, status, left):
    gap = max(under[0].gaps) - max(control[0].gaps)
    if gap > MAX_GAP:
        yield f"{name}: a gap {gap:.2f} s longer than without it"
    if (health := max(under[1].health)) > MAX_HEALTH:
        yield f"{name}: /health took {health:.2f} s"
    if (more := max(under[1].memory) - max(control[1].memory)) > MAX_MEMORY:
        yield f"{name}: {more / 1e6:.0f} MB more than without it"
    if ended > MAX_END or status != 0:
        yield f"{name}: after SIGTERM it took {ended:.1f} s, and ended with status {status}"
    if left:
        yield f"{name}: processes are left: {left}"
    for said in [*under[0].wrong, *under[1].wrong][:5]:
        yield f"{name}: {said}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--log", action="store_true", help="the end of the server's")
    given = parser.parse_args()
    for name in given.attacks:
        if name not in ATTACKS:
            parser.error(f"attack {name!r} is unknown; expected {', '.join(ATTACKS)}")
    titles = ("gap", "median", "health", "schema", "MB", "end", "statuses")
    print(f"{'attack':>15}  " + "  ".join(f"{title:>8}" for title in titles))
    found = [one for name in given.attacks or ATTACKS for one in attacked(name, given)]
    for one in found:
        print(one)
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()

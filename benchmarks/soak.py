"""A server under load for minutes: clients that ask, name heads, hang up and send nonsense, while
those heads are exchanged on disk and have not all room in memory. Is every valid request answered,
is memory flat, and is every 20th answer that of Engine.generate?

python benchmarks/soak.py [--minutes 30] [--clients 8] [--model debug-tiny] [--heads untrained]

Prints a table; exit status 1 where something was wrong.
"""

import argparse
import collections
import json
import random
import shutil
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil
import torch
from served_process import served

import medusa_kit
from medusa_kit import console
from medusa_kit.engine.heads_store import HeadsStore
from medusa_kit.engine.load import with_heads
from medusa_kit.heads import save_heads
from medusa_kit.tree.candidate_tree import CandidateTree, save_tree

EVERY = 20  # answers, one of which is compared
WARM_UP = 0.25  # of the time, after which memory counts
MAX_GROWTH = 0.05
SAMPLE_SECONDS = 1.0
NAMED = 6  # heads that requests may name, each with its own weights
ROOM_FOR = 3  # of them in memory
NAMING = 0.3  # share of the requests that name heads
EXCHANGE_SECONDS = 2.0  # between two exchanges of a folder
PATIENCE = 20  # times that a request is sent again after 429, or 404 while a folder is exchanged
MALFORMED = [
    b"{", b"[]", b'{"messages": []}', b'{"model": "nobody", "messages": "hello"}',
    b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0}',
    b'{"messages": [{"role": "user", "content": "hi"}], "unknown_field": 1}',
    b'{"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"a": 1e99}}',
    b"\xff\xfe", b"[" * 20000,
]  # fmt: skip
WORDS = """apple river seven green quickly the of a stone tells walks under bright and 1 2 3 , .
def return print for in range"""


class NamedHeads:
    """Folders of heads, of which one after the other is exchanged while the server runs."""

    def __init__(self, engine, folder, seed=0):
        self.engine, self.folder, self.exchanges = engine, folder, 0
        self.rng = torch.Generator().manual_seed(seed)
        self.names = [f"heads-{n}" for n in range(NAMED)]
        for name in self.names:
            self.write(folder / name)
        with HeadsStore(engine, folder) as store, store.get(self.names[0]):
            self.bytes = store.num_bytes

    def write(self, folder):
        heads = with_heads(self.engine, "untrained").heads
        with torch.no_grad():
            for weight in heads.parameters():
                weight.add_(0.1 * torch.randn(weight.shape, generator=self.rng))
        save_heads(heads, folder)
        save_tree(CandidateTree.chain(heads.num_heads), folder / "tree.json", {})

    def exchange(self, ended):
        """Until then: put others in place of one of them, under its name."""
        while not ended.wait(EXCHANGE_SECONDS):
            name = self.names[self.exchanges % NAMED]
            new, old = self.folder / ".new", self.folder / ".old"
            self.write(new)
            (self.folder / name).rename(old)
            new.rename(self.folder / name)
            shutil.rmtree(old)
            self.exchanges += 1


class Soak:
    def __init__(self, url, model, engine, seconds, names):
        self.url, self.model, self.engine, self.names = url, model, engine, names
        self.end = time.monotonic() + seconds
        self.counts, self.failures = collections.Counter(), []
        self.to_check = []
        self.lock = threading.Lock()

    def client(self, seed):
        """One client, until the end."""
        rng = random.Random(seed)
        kinds = [self.whole, self.streamed, self.cancelled, self.malformed, self.half_sent]
        with httpx.Client(base_url=self.url, timeout=120) as http:
            while time.monotonic() < self.end:
                kind = rng.choices(kinds, (6, 6, 3, 2, 1))[0]
                try:
                    kind(http, rng)
                except Exception as error:
                    self.fail(f"{kind.__name__}: {type(error).__name__}: {error}")
                with self.lock:
                    self.counts[kind.__name__] += 1

    def fail(self, why):
        with self.lock:
            self.failures.append(why)

    def request(self, rng, **more):
        words = [rng.choice(WORDS.split()) for _ in range(rng.randrange(1, 40))]
        asked = {
            "model": self.model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": rng.randrange(1, 64),
            "return_token_ids": True,
            "medusa_kit": {"drafter": rng.choice(["auto", "medusa", "none", "prompt-lookup"])},
            **more,
        }
        if self.names and rng.random() < NAMING:
            asked["model"] += f":{rng.choice(self.names)}"
        if rng.random() < 0.3:
            asked |= {"temperature": 0.8, "seed": rng.randrange(1000)}
        else:
            asked["temperature"] = 0
        return asked

    def whole(self, http, rng):
        asked = self.request(rng)
        for turn in range(PATIENCE):
            answer = http.post("/v1/chat/completions", json=asked)
            if not self.again(asked, answer, turn):
                break
        if answer.status_code != 200:
            return self.fail(f"{answer.status_code}: {answer.text[:200]}")
        self.keep(asked, answer.json()["choices"][0]["token_ids"])

    def again(self, asked, answer, turn):
        """Whether to send it once more: the heads in use leave no room, or were just exchanged."""
        named = ":" in asked["model"]
        if not named or answer.status_code not in (404, 429) or turn + 1 == PATIENCE:
            return False
        with self.lock:
            self.counts[f"sent again after {answer.status_code}"] += 1
        time.sleep(0.1)
        return True

    def streamed(self, http, rng, turn=0):
        asked, tokens, ended = self.request(rng, stream=True), [], False
        with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            if self.again(asked, answer, turn):
                return self.streamed(http, rng, turn + 1)
            if answer.status_code != 200:
                return self.fail(f"{answer.status_code}: {answer.read()[:200]!r}")
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line:
                    content = json.loads(line.removeprefix("data: "))
                    if "error" in content:
                        return self.fail(f"in a stream: {content}")
                    for choice in content["choices"]:
                        tokens += choice.get("token_ids") or []
        if not ended:
            return self.fail("a stream broke off")
        self.keep(asked, tokens)

    def cancelled(self, http, rng):
        asked = self.request(rng, stream=True, max_tokens=200)
        with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            lines = answer.iter_lines()
            for _ in range(rng.randrange(4)):
                next(lines, None)

    def malformed(self, http, rng):
        body = rng.choice(MALFORMED)
        answer = http.post("/v1/chat/completions", content=body)
        if not 400 <= answer.status_code < 500 or "error" not in answer.json():
            self.fail(f"{body[:60]!r} got {answer.status_code}: {answer.text[:200]}")

    def half_sent(self, http, rng):
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as half:
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                         b"Content-Length: 100\r\n\r\n{"[: rng.randrange(1, 80)])  # fmt: skip

    def keep(self, asked, tokens):
        with self.lock:
            self.counts["answers"] += 1
            self.counts["tokens"] += len(tokens)
            if self.counts["answers"] % EVERY == 0:
                self.to_check.append((asked, tokens))

    def check(self):
        """Compare what was kept, plainly decoded, all alone."""
        for asked, tokens in self.to_check:
            names = ("temperature", "seed")
            sampling = {name: asked[name] for name in names if name in asked}
            expected = self.engine.generate(
                asked["messages"], max_new_tokens=asked["max_tokens"], drafter="none", **sampling
            ).token_ids
            stops = self.engine.base.stop_token_ids
            if tokens != [token for token in expected if token not in stops]:
                self.fail(f"another answer: {asked}: {tokens} instead of {expected}")


def memory_of(process):
    return psutil.Process(process.pid).memory_info().rss / 2**20


def settle(url):
    """How the batch stands once nobody asks any more."""
    with httpx.Client(base_url=url, timeout=30) as http:
        for _ in range(100):
            batch = http.get("/v1/batch").json()
            if not (batch["rows"] or batch["reading"] or batch["waiting"]):
                return 0
            time.sleep(0.1)
    return batch["rows"] + batch["reading"] + batch["waiting"]


def run(given, engine, named):
    options = ["--heads", given.heads, "--log-format", "json", "--max-rows", str(given.rows)]
    options += ["--heads-dir", str(named.folder)]
    options += ["--heads-memory", str(ROOM_FOR * named.bytes * 1.01 / 1e9)]
    with served(given.model, *options) as (process, url):
        with httpx.Client(base_url=url, timeout=30) as http:
            model = http.get("/v1/models").json()["data"][0]["id"]
        soak = Soak(url, model, engine, 60 * given.minutes, named.names)
        start, memory, ended = time.monotonic(), [], threading.Event()
        exchanger = threading.Thread(target=named.exchange, args=(ended,))
        exchanger.start()
        threads = [threading.Thread(target=soak.client, args=(n,)) for n in range(given.clients)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            memory.append((time.monotonic() - start, memory_of(process)))
            time.sleep(SAMPLE_SECONDS)
        ended.set()
        exchanger.join()
        soak.counts["heads exchanged"] = named.exchanges
        if left := settle(url):
            soak.fail(f"{left} rows are still in the batch")
    soak.check()
    return soak, memory


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--model", default="debug-tiny")
    parser.add_argument("--heads", default="untrained")
    given = parser.parse_args()
    engine = medusa_kit.load(given.model, heads=given.heads)
    with tempfile.TemporaryDirectory() as folder:
        soak, memory = run(given, engine, NamedHeads(engine, Path(folder)))
    counted = [size for when, size in memory if when >= WARM_UP * memory[-1][0]]
    part = max(1, len(counted) // 4)
    first, last = statistics.mean(counted[:part]), statistics.mean(counted[-part:])
    growth = last / first - 1
    if growth > MAX_GROWTH:
        soak.fail(f"memory grew by {growth:.1%}; expected at most {MAX_GROWTH:.0%}")
    rows = [[name, f"{count:,}"] for name, count in sorted(soak.counts.items())]
    rows += [
        ["compared token for token", f"{len(soak.to_check):,}"],
        ["memory after warm-up, MiB", f"{first:.0f}"],
        ["memory at the end, MiB", f"{last:.0f} ({growth:+.1%})"],
        ["failures", f"{len(soak.failures):,}"],
    ]
    title = f"{given.minutes:g} minutes, {given.clients} clients, {given.model}"
    console.out.print(console.table(title, ["what", "number"], rows))
    for why, count in collections.Counter(soak.failures).most_common(20):
        console.warn(f"{count} × {why}")
    raise SystemExit(1 if soak.failures else 0)


if __name__ == "__main__":
    main()

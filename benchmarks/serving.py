"""Several servers on this machine in one interleaved run, on the same prompts.

    python benchmarks/serving.py PROMPTS.jsonl [--servers benchmarks/servers.yaml] [--rounds 5]
        [--concurrency 1,4,8,16] [-n 96] [--only NAME] [--rate 2 --seed 0] [--model NAME]
        --output FOLDER

In each round every server is started, measured and stopped, one after another, in rotating order.
Every load has prompts of its own: they are asked once, so that no server has seen them since its
start, then again (`seen`). Loads take turns with the prompts from round to round.

Ratios are the first server's figure over another's within a round: above 1 in tokens/s and below 1
in time the first is the better. The median is told with the least and the greatest of the rounds.
A server that does not start is a row with the reason. Linux also tells of each server the seconds
until it answered and its peak of resident memory, mapped pages counted, with the processes that it
started. Writes serving.json, serving.md and load.png.
"""

import argparse
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import yaml
from rounds import rotated, spread

from medusa_kit import console
from medusa_kit.bench.endpoint import Question
from medusa_kit.bench.load.arrivals import Closed, Poisson
from medusa_kit.bench.load.report import draw_load, load_name
from medusa_kit.bench.load.run import LoadRun
from medusa_kit.cli.prompts import read_prompts
from medusa_kit.distill.openai_client import Endpoint
from medusa_kit.distill.openai_stream import probe, stream_answer
from medusa_kit.errors import MedusaKitError
from medusa_kit.files import write_json, write_text
from medusa_kit.settings.engine import EMBEDDED_NAME

START_SECONDS = 900
STOP_SECONDS = 30
SERVERS = Path(__file__).with_name("servers.yaml")
KEYS = {"name", "command", "model", "environment"}
SEEN, UNSEEN = "seen", "unseen"


def read_servers(path, only):
    servers = yaml.safe_load(path.read_text(encoding="utf-8"))
    for server in servers:
        if unknown := set(server) - KEYS or not {"name", "command", "model"} <= set(server):
            raise SystemExit(f"{path}: {server}: expected {sorted(KEYS)}; unknown: {unknown}")
    if unknown := set(only) - {server["name"] for server in servers}:
        raise SystemExit(f"{path} has no server {sorted(unknown)}")
    return [server for server in servers if not only or server["name"] in only]


def put_in(text, values):
    """Only the words in braces that are ours: commands may have JSON in them."""
    for name, value in values.items():
        text = text.replace("{" + name + "}", str(value))
    return text


@contextmanager
def running(server, values, log):
    """(the URL up to /v1, the process, its seconds) once it answers. RuntimeError with the reason
    where it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        values = {**values, "port": free.getsockname()[1]}
    command = shlex.split(put_in(server["command"], values))
    environment = {**os.environ, **(server.get("environment") or {})}
    begun = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        try:
            process = subprocess.Popen(
                command, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )
        except OSError as error:
            raise RuntimeError(f"{command[0]}: {error.strerror}") from error
    url = f"http://127.0.0.1:{values['port']}"
    try:
        wait_for(url, process, log)
        yield url + "/v1", process.pid, time.monotonic() - begun
    finally:
        stop(process)


def wait_for(url, process, log):
    """Any answer will do: not every server has the same pages."""
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except urllib.error.HTTPError as error:
            if error.code != 503:  # it is loading
                return
        except OSError:
            pass
        time.sleep(0.05)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    ended = process.poll()
    why = "it is not ready" if ended is None else f"it ended with status {ended}"
    raise RuntimeError(f"{why}: {lines[-1][:200] if lines else 'it said nothing'}")


def peak_bytes(pid):
    """Of a process and those that it started; None where /proc does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        children = [child for task in tasks for child in task.read_text().split()]
    except OSError:
        return None
    own = next((line.split()[1] for line in status.splitlines() if "VmHWM" in line), "0")
    return 1024 * int(own) + sum(peak_bytes(child) or 0 for child in children)


def stop(process):
    """It and the processes that it started, which are of its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_SECONDS)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def measure(server, url, values, shares, given):
    """[{load, unseen: figures, seen: figures}], by load."""
    endpoint, usage = probe(
        Endpoint(url, put_in(server["model"], values), max_new_tokens=given.max_new_tokens,
                 return_token_ids=True, api_key_env=given.api_key_env)
    )  # fmt: skip
    warm_up(endpoint, given.warm_up)
    found = []
    for load, questions in shares:
        point = {load.what: load.value}
        for kind in (UNSEEN, SEEN):
            run = LoadRun(endpoint, questions, no_tokenizer, usage)
            measured = run.measure(load)
            texts = {one.number: one.text for one in measured.records if one.answered}
            point[kind] = {**measured.as_dict(), "texts": texts}
        found.append(point)
    return found


def warm_up(endpoint, count):
    """Prompts that nobody measures, one after another."""
    for number in range(count):
        content = f"Warm-up {number}: write a few words about the number {number}."
        stream_answer(endpoint, [{"role": "user", "content": content}], include_usage=False)


def no_tokenizer():
    raise MedusaKitError("the server sends neither usage nor token ids: tokens cannot be counted")


def shares_of(prompts, loads, number):
    """(load, its prompts) of a round: each load has other prompts in the next round."""
    asked = [Question(place, messages) for place, messages in enumerate(prompts, start=1)]
    return [
        (load, asked[(place + number) % len(loads) :: len(loads)])
        for place, load in enumerate(loads)
    ]


def run_rounds(servers, prompts, loads, values, given, keep):
    """By server: the figures of each round, or why there are none (then it is not tried again).

    `keep` gets both after every round, since a run takes hours, and what each start cost.
    """
    rounds, not_run = {server["name"]: [] for server in servers}, {}
    costs = {server["name"]: [] for server in servers}
    for number in range(given.rounds):
        shares = shares_of(prompts, loads, number)
        for server in rotated(servers, number):
            name = server["name"]
            if name in not_run:
                continue
            console.note(f"round {number + 1} of {given.rounds}: {name}")
            log = given.output / f"{name.replace(' ', '_').replace('/', '_')}.log"
            try:
                with running(server, values, log) as (url, pid, seconds):
                    rounds[name].append(measure(server, url, values, shares, given))
                    costs[name].append({"start_seconds": seconds, "peak_bytes": peak_bytes(pid)})
            except (RuntimeError, MedusaKitError) as error:
                not_run[name] = str(error)
                console.warn(f"{name}: {error}")
        keep(rounds, not_run, costs)
    return rounds, not_run, costs


def ratios(rounds, first, name, place, kind, figure):
    """The first server's figure over this one's, in each round that both have."""
    pairs = zip(rounds[first], rounds[name], strict=False)
    found = [(figure(ours[place][kind]), figure(theirs[place][kind])) for ours, theirs in pairs]
    return sorted(ours / theirs for ours, theirs in found if ours is not None and theirs)


def tokens_per_second(point):
    return point["tokens_per_second"]


def first_token(point):
    known = point["first_token_seconds"]
    return None if known is None else known["p50"]


def median(rounds, place, kind, figure, scale=1.0, digits=1):
    known = [figure(one[place][kind]) for one in rounds]
    known = [scale * value for value in known if value is not None]
    return f"{statistics.median(known):.{digits}f}" if known else "–"


def same_answers(rounds, first, name, place, kind):
    """Answers with the text of the first server's, of those that both gave."""
    same = total = 0
    for ours, theirs in zip(rounds[name], rounds[first], strict=False):
        texts, others = ours[place][kind]["texts"], theirs[place][kind]["texts"]
        both = texts.keys() & others.keys()
        total += len(both)
        same += sum(texts[number] == others[number] for number in both)
    return f"{same}/{total}"


COLUMNS = ["server", "tokens/s", "first\n/ this", "first\ntoken, ms", "first\n/ this",
           "between\ntokens, ms", "failed", "same"]  # fmt: skip


def tables(rounds, not_run, servers, loads):
    """(title, rows) for each load, of prompts unseen and seen."""
    first = servers[0]["name"]
    for place, load in enumerate(loads):
        for kind in (UNSEEN, SEEN):
            rows = []
            for name in (server["name"] for server in servers):
                if name in not_run:
                    rows.append([name, "not run", *["–"] * (len(COLUMNS) - 2)])
                if rounds[name]:
                    rows.append(row_of(rounds, first, name, place, kind))
            yield f"{load_name({load.what: load.value}, load.what)}, prompts {kind}", rows


def row_of(rounds, first, name, place, kind):
    own = rounds[name]
    return [
        name,
        median(own, place, kind, tokens_per_second),
        spread(ratios(rounds, first, name, place, kind, tokens_per_second)),
        median(own, place, kind, first_token, 1e3),
        spread(ratios(rounds, first, name, place, kind, first_token)),
        median(own, place, kind, between_tokens, 1e3),
        sum(one[place][kind]["failed"] for one in own),
        same_answers(rounds, first, name, place, kind),
    ]


def between_tokens(point):
    known = point["token_seconds"]
    return None if known is None else known["p50"]


def cost_rows(costs):
    """Medians over rounds."""
    rows = []
    for name, found in costs.items():
        peaks = [one["peak_bytes"] for one in found if one["peak_bytes"]]
        if found:
            start = statistics.median(one["start_seconds"] for one in found)
            peak = f"{statistics.median(peaks) / 1e6:.0f}" if peaks else "–"
            rows.append([name, f"{start:.1f}", peak])
    return rows


COST_COLUMNS = ["server", "start, s", "peak memory, MB"]


def write(rounds, not_run, costs, servers, loads, given):
    console.out.print(console.table("start and memory", COST_COLUMNS, cost_rows(costs)))
    text = f"start and memory\n\n{console.markdown(COST_COLUMNS, cost_rows(costs))}\n\n"
    for title, rows in tables(rounds, not_run, servers, loads):
        narrow = [[str(cell).replace(" (", "\n").rstrip(")") for cell in row] for row in rows]
        console.out.print(console.table(title, COLUMNS, narrow))
        text += f"{title}\n\n{console.markdown(COLUMNS, rows)}\n\n"
    for name, why in not_run.items():
        console.warn(f"{name} was not run: {why}")
        text += f"- {name}: not run: {why}\n"
    write_text(given.output / "serving.md", text)
    drawn = {name: [point[UNSEEN] for point in found[-1]]
             for name, found in rounds.items() if found}  # fmt: skip
    if drawn:
        draw_load(drawn, loads[0].what, "prompts not seen before, the last round", given.output)


def loads_of(given):
    if given.rate:
        return [Poisson(float(rate), given.seed) for rate in given.rate.split(",")]
    return [Closed(int(number)) for number in given.concurrency.split(",")]


def values_of(loads, given):
    """What stands in braces in commands."""
    from medusa_kit.base.files import gguf_source
    from medusa_kit.base.gguf import dequantised_folder

    gguf = gguf_source(given.model)
    folder = dequantised_folder(gguf) if given.model == EMBEDDED_NAME else "-"
    at_once = max([given.rows, *(load.concurrency for load in loads if isinstance(load, Closed))])
    python = Path(sys.executable)
    return {"python": python, "bin": python.parent, "threads": given.threads, "rows": at_once,
            "gguf": gguf, "folder": folder, "name": given.model}  # fmt: skip


def parser():
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("prompts")
    made.add_argument("--servers", type=Path, default=SERVERS)
    made.add_argument("--model", default=EMBEDDED_NAME, help="a GGUF file by name")
    made.add_argument("--only", action="append", default=[], help="a server's name; repeatable")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--concurrency", default="1,4,8,16")
    made.add_argument("--rate", help="requests a second, by commas: Poisson arrivals")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--rows", type=int, default=8, help="of the servers' batch, at least")
    made.add_argument("--limit", type=int)
    made.add_argument("-n", "--max-new-tokens", type=int, default=96)
    made.add_argument("--warm-up", type=int, default=2, help="requests before each measurement")
    made.add_argument("--threads", type=int, default=os.cpu_count())
    made.add_argument("--api-key-env", default="OPENAI_API_KEY")
    made.add_argument("--output", type=Path, default=Path("build/serving"))
    return made


def stop_on_signals():
    """End by an exception where a signal would end us: servers are stopped on the way out."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))


def main():
    stop_on_signals()
    given = parser().parse_args()
    servers, loads = read_servers(given.servers, given.only), loads_of(given)
    prompts = read_prompts(given.prompts, given.limit)
    if len(prompts) < len(loads):
        raise SystemExit(f"{len(prompts)} prompts for {len(loads)} loads; each needs its own")
    given.output.mkdir(parents=True, exist_ok=True)
    told = {
        "prompts": given.prompts,
        "model": given.model,
        "max_new_tokens": given.max_new_tokens,
        "arrivals": loads[0].as_dict(),
        "threads": given.threads,
        "servers": servers,
    }

    def keep(rounds, not_run, costs):
        found = {"not_run": not_run, "costs": costs, "rounds": rounds}
        write_json(given.output / "serving.json", {**told, **found})

    found = run_rounds(servers, prompts, loads, values_of(loads, given), given, keep)
    write(*found, servers, loads, given)
    rounds = found[0]
    raise SystemExit(0 if any(rounds.values()) else 1)


if __name__ == "__main__":
    main()

"""One version at work: commands on stdin, figures on stdout, a JSON line each.

Runs as a file, with PYTHONPATH naming the version, and imports nothing of this package. It uses
only what versions share: `medusa_kit.load`, `Engine.generate`, the command line, the server.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # process_cost, served_process

MB = 1e6


class Work:
    """What a command may ask for: its public methods, with the command's other fields."""

    def __init__(self) -> None:
        self.ends = contextlib.ExitStack()
        self.engine: Any = None
        self.url = ""
        self.device: Any = None

    def load(self, model: str, **options: Any) -> dict[str, Any]:
        import medusa_kit

        self.engine = medusa_kit.load(model, **options)
        return {}

    def answer(self, prompt: Any, figure: str, **asked: Any) -> dict[str, Any]:
        """The speed after the first token, or the seconds until it."""
        result = self.engine.generate(prompt, **asked)
        stats = result.stats
        decoding = (stats.new_tokens - 1) / max(stats.seconds - stats.first_token_seconds, 1e-9)
        figures = {"tokens/s": decoding, "seconds": stats.first_token_seconds}
        return {"figures": {figure: figures[figure]}, "said": result.token_ids}

    def serve(self, model: str) -> dict[str, Any]:
        from served_process import served

        _, self.url = self.ends.enter_context(served(model))
        return {}

    def clients(self, prompts: list[str], tokens: int) -> dict[str, Any]:
        """As many clients as prompts, at once."""
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as threads:
            told = list(threads.map(lambda one: self._chat(one, tokens), prompts))
        taken = time.perf_counter() - start
        count = sum(one["usage"]["completion_tokens"] for one in told)
        said = [one["choices"][0]["message"]["content"] for one in told]
        return {"figures": {"tokens/s": count / taken}, "said": said}

    def _chat(self, prompt: str, tokens: int) -> Any:
        body = {"model": "any", "max_tokens": tokens, "temperature": 0,
                "messages": [{"role": "user", "content": prompt}]}  # fmt: skip
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=60) as models:
            body["model"] = json.load(models)["data"][0]["id"]
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def command(self, arguments: list[str], work: int = 0) -> dict[str, Any]:
        """A run of the command line: its start and memory, or how fast it does so much `work`."""
        from process_cost import cost_of

        with tempfile.TemporaryDirectory() as folder:
            given = [one.replace("{folder}", folder) for one in arguments]
            cost = cost_of([sys.executable, "-m", "medusa_kit", *given])
            if metrics := list(Path(folder).rglob("metrics.jsonl")):
                lines = [json.loads(one) for one in metrics[0].read_text().splitlines()]
                updates = [one for one in lines if "loss" in one]
                last, first = updates[-1], updates[0]
                taken = last["seconds"] - first["seconds"]
                speed = (last["step"] - first["step"]) / max(taken, 1e-9)
                return {"figures": {"updates/s": speed}}
        if work:
            return {"figures": {"tokens/s": work / cost.seconds}}
        first_seconds = cost.first_output_seconds or cost.seconds
        return {"figures": {"seconds": first_seconds, "MB": cost.peak_bytes / MB}}

    def stand_in(self, **options: Any) -> dict[str, Any]:
        """An engine on the tests' stand-in for CUDA, which counts."""
        import medusa_kit

        sys.path.append(str(Path(medusa_kit.__file__).parents[1] / "tests"))
        from support import cuda_stand_in

        self.device = self.ends.enter_context(cuda_stand_in.installed())
        return self.load(device="cuda", **options)

    def counts(self, prompt: Any, **asked: Any) -> dict[str, Any]:
        with self.device.counted() as counts:
            said = self.engine.generate(prompt, **asked).token_ids
        found = {"waits": len(counts.waits), "captures": counts.captures}
        return {"figures": found, "said": said}


def main() -> None:
    # What commands and libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import medusa_kit

    folder, expected = Path(medusa_kit.__file__).parents[1], Path(os.environ["PYTHONPATH"])
    if folder.resolve() != expected.resolve():
        raise SystemExit(f"medusa_kit is of {folder}; expected {expected}")
    work = Work()
    with work.ends:
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                answer = getattr(work, asked.pop("do"))(**asked)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

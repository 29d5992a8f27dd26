"""A stand-in Hub for the real client, and a folder of heads with everything beside them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http
from support.checked_once import checked_once  # noqa: F401
from support.clocks import own_time
from support.rank_tables import random_statistics
from support.standin_hub import TOKEN, StandInHub
from support.typed import typed_command

from medusa_kit import console
from medusa_kit.base import hub_client
from medusa_kit.base.model import BaseModel, BaseModelInfo
from medusa_kit.bench.about import About
from medusa_kit.bench.report import BenchReport, MethodResult, Tally
from medusa_kit.bench.verify_report import Difference, VerifyReport
from medusa_kit.files import file_digest
from medusa_kit.heads import MedusaHeads, save_heads
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree, save_tree

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that would have been waited; no test waits."""
    asked: list[float] = []
    own_time(monkeypatch, hub_client, _http, sleep=asked.append)
    return asked


@pytest.fixture
def hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waits: list[float]
) -> Iterator[StandInHub]:
    """The client talks to it, logged in, and to nobody else."""
    server = StandInHub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    yield server
    huggingface_hub.close_session()
    server.close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command: (exit code, stdout, stderr). The token is in neither."""
    monkeypatch.setattr(console.err, "width", 160)
    typed = typed_command(monkeypatch, capsys)

    def call(*arguments: object) -> tuple[int, str, str]:
        code, out, err = typed(*arguments)
        assert TOKEN not in out + err
        return code, out, err

    return call


@pytest.fixture
def folder(chat_base: BaseModel, tmp_path: Path) -> Path:
    """Three heads for debug-tiny with statistics, a tree, and reports in their commands' form."""
    place = tmp_path / "made"
    save_heads(MedusaHeads.for_base(chat_base, 3), place)
    info = chat_base.info
    own = {"base_model": info.name, "base_fingerprint": info.fingerprint}
    found = random_statistics(0, [9, 14, 3, 20, 11, 8, 30, 17])
    replace(found, meta={**own, "prompts": "/home/me/secret/questions.jsonl"}).save(
        place / "statistics.npz"
    )
    tree = CandidateTree([(0,), (1,), (0, 0), (0, 0, 0)])
    machine = {"processor": "Abacus 3", "device": "cpu", "threads": 2, "torch": "9.9"}
    row = {"num_nodes": 5, "acceptance_length": 1.75, "step_ms": 2.5, "predicted_speed_up": 1.4}
    save_tree(tree, place / "tree.json", {**own, "machine": machine, "table": [row]})
    digest = file_digest(place / "heads.safetensors")
    setup = {"processor": "Abacus 4", "threads": 3, "torch": "9.9", "transformers": "8.8",
             "steps_run_by": "beads"}  # fmt: skip
    _write(place / "bench.json", _bench(info, digest, setup).to_json())
    _write(place / "verify.json", {"greedy": _verified(info, digest, setup).to_json()})
    return place


def _write(path: Path, record: object) -> None:
    path.write_text(json.dumps(record))


def _bench(info: BaseModelInfo, digest: str, setup: dict[str, object]) -> BenchReport:
    plain = Tally(answers=4, tokens=100, seconds=1.0, identical=4, rates=[100.0] * 4)
    ours = Tally(answers=4, tokens=225, seconds=1.0, identical=4, rates=[225.0] * 4, num_steps=8,
                 step_tokens=15, depth_steps=[5.0, 2.0])  # fmt: skip
    results = [
        MethodResult("transformers generate", plain, kind="transformers"),
        MethodResult("medusa-kit", ours, kind="ours", drafter="medusa"),
    ]
    about = About.of(
        "/home/me/mt_bench.jsonl", SamplingParams(), base=info.as_dict(), setup=setup,
        heads={"medusa-kit": digest},
    )  # fmt: skip
    return BenchReport(results, 4, 16, about=about)


def _verified(info: BaseModelInfo, digest: str, setup: dict[str, object]) -> VerifyReport:
    about = {"heads": digest, "base": info.as_dict(), "setup": setup,
             "prompts": "verify_prompts.jsonl"}  # fmt: skip
    return VerifyReport(7, 1234, [Difference(2, 5, 7, 8, 1e-7, 1.5e-6)], 1.5e-6, 1.8,
                        drafter="medusa", about=About.model_validate(about))  # fmt: skip

"""benchmarks/beside_peers.py: questions to programs, rounds in pieces, ratios."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from support.small_engines import build_engine

from medusa_kit.base.model import BaseModel

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
PEER = """#!{python} -IS
import sys
print(0.5, flush=True)
for line in sys.stdin:
    print(len(line.split()), flush=True)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("beside_peers")


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "peer_speed"
    path.write_text(PEER.format(python=sys.executable), encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_a_peer_answers_case_by_case(script: Any, program: str) -> None:
    peer = script.Peer(program, Path("a.gguf"), 2)
    assert peer.start_seconds == 0.5
    assert [peer("prompt 16"), peer("decode 16 4 1")] == [2, 4]
    peer.close()
    assert peer.process.returncode == 0


def test_a_peer_that_ends_is_told(script: Any) -> None:
    with pytest.raises(RuntimeError, match="ended"):
        script.Peer("true", Path("a.gguf"), 2)


def test_an_engine_answers_the_same_questions(script: Any, base: BaseModel) -> None:
    ours = script.Ours(build_engine(base, heads=None))
    for case in ("prompt 8", "decode 8 2 1", "decode 8 2 3", "step 8 2"):
        assert ours(case) > 0


def test_rounds_are_added_and_ratios_are_within_a_round(script: Any) -> None:
    order = list[str]()
    times = {"ours": iter((0.1, 0.2)), "peer": iter((0.2, 0.1))}

    def asked(name: str) -> Any:
        def answer(case: str) -> float:
            order.append(name)
            return next(times[name])

        return answer

    figures: dict[str, Any] = {}
    programs = {name: asked(name) for name in times}
    kept = list[Any]()
    for _ in range(2):  # two runs of a round each
        script.measure(["step 8 1"], programs, 1, figures, lambda now: kept.append(dict(now)))
    assert order == ["ours", "peer", "peer", "ours"]
    assert len(kept) == 2
    ours, peer, absent = script.rows(figures, [*times, "absent"], ["peer"])
    assert ours == ["step 8 1", "ours", "150.0", "2", "1.25 (0.50 to 2.00)"]
    assert peer[-1] == "1.00 (1.00 to 1.00)"
    assert absent[2:] == ["–", "0", "–"]

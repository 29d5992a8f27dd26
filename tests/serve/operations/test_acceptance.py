"""The server tells, once, of text that its heads do not suit and of drafters that gain nothing."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.serving.live_server import live_server
from support.small_engines import engine_with_heads, lively_chat_base

from medusa_kit.serve.operations import acceptance
from medusa_kit.serve.operations.acceptance import ServedAcceptance
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.plan import PlannedTree, TreePlan

SMALL, LARGE = CandidateTree.chain(1), CandidateTree.chain(2)
PLAN = TreePlan(
    (PlannedTree(1, LARGE, None, (0.6, 0.3)), PlannedTree(4, SMALL, None, (0.6,)))
)  # expects 1.9 alone, 1.6 in batches


@dataclass
class Ended:
    """As much of a request as is counted."""

    num_steps: int
    accepted: int
    num_nodes: int
    token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = [0] * (1 + self.num_steps + self.accepted)


def told(
    capsys: pytest.CaptureFixture[str], *answers: tuple[str, Ended], heads: str | None = None
) -> str:
    served = ServedAcceptance(PLAN)
    for drafter, answer in answers:
        served.add(drafter, heads, answer)  # type: ignore[arg-type]
    return capsys.readouterr().err


@pytest.mark.parametrize("drafter", ["medusa", "auto"])
def test_text_that_heads_do_not_guess(drafter: str, capsys: pytest.CaptureFixture[str]) -> None:
    poor = (drafter, Ended(1000, 400, 3000))
    assert told(capsys, poor) == ""  # too few steps to say so
    said = told(capsys, *[poor] * 6)
    assert said.count("acceptance length is 1.40") == 1
    assert "1.60 when" in said.replace("\n", " ")
    assert told(capsys, *[poor] * 6, heads="other") == ""  # which were not measured here
    assert told(capsys, *[(drafter, Ended(1000, 500, 3000))] * 6) == ""  # within a tenth
    assert told(capsys, *[(drafter, Ended(1000, 100, 1100))] * 6) == ""  # heads hardly drafted


def test_a_drafter_that_is_never_right(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, *[("suffix", Ended(1000, 0, 3000))] * 4)
    assert said.count("drafter 'suffix' guessed") == 1
    assert told(capsys, *[("suffix", Ended(1000, 1, 3000))] * 4) == ""
    assert told(capsys, *[("none", Ended(1000, 0, 1000))] * 4) == ""  # which guesses nothing


def test_it_is_told_by_a_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "STEPS", 8)
    engine = engine_with_heads(lively_chat_base())
    engine.use_tree(PLAN)
    with live_server(engine) as live, live.http() as http:
        asked: dict[str, Any] = {"model": live.model, "prompt": "Rivers", "max_tokens": 24,
                                 "temperature": 0}  # fmt: skip
        assert http.post("/v1/completions", json=asked).status_code == 200
        page = http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    (sample,) = families["medusa_kit_measured_acceptance_length"].samples
    assert sample.value == pytest.approx(1.6)
    assert "was 1.60 when their tree" in " ".join(capsys.readouterr().err.split())

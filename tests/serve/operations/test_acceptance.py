"""The server tells, once, of text that its heads do not suit and of drafters that gain nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.serving.live_server import live_server
from support.small_engines import engine_with_heads, lively_chat_base

from medusa_kit.serve.operations import acceptance
from medusa_kit.serve.operations.acceptance import ServedAcceptance
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.plan import PlannedTree, TreePlan

SMALL, LARGE = CandidateTree.chain(1), CandidateTree.chain(2)
PLAN = TreePlan(
    (PlannedTree(1, LARGE, None, (0.6, 0.3)), PlannedTree(4, SMALL, None, (0.6,)))
)  # expects 1.9 alone, 1.6 in batches


def ended(*steps: tuple[str | None, int, int, int], temperature: float = 0.0) -> Any:
    """As much of a request as is counted: (who drafted, nodes, accepted depth, steps)."""
    drafted = {(who, nodes, depth): count for who, nodes, depth, count in steps}
    sampler = SimpleNamespace(params=SamplingParams(temperature))
    return SimpleNamespace(drafted_steps=drafted, sampler=sampler)


def told(
    capsys: pytest.CaptureFixture[str], *answers: tuple[str, Any], heads: str | None = None
) -> str:
    served = ServedAcceptance(PLAN)
    for drafter, answer in answers:
        served.add(drafter, heads, answer)
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("drafter", ["medusa", "auto"])
def test_text_that_heads_do_not_guess(drafter: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Against what trees of as many nodes came to: 0.6 of two, 0.9 of three."""
    source = "medusa" if drafter == "auto" else None
    poor = (drafter, ended((source, 2, 0, 300), (source, 2, 1, 200)))  # 0.4 a step
    assert told(capsys, poor) == ""  # too few steps to say so
    said = told(capsys, *[poor] * 6)
    assert said.count("acceptance length is 1.40") == 1
    assert "1.60 is expected" in said
    assert told(capsys, *[poor] * 6, heads="other") == ""  # which were not measured here
    assert told(capsys, *[(drafter, ended((source, 2, 0, 500), (source, 2, 1, 500)))] * 6) == ""
    larger = (drafter, ended((source, 3, 0, 500), (source, 3, 1, 500)))  # 0.5 of three nodes
    assert "1.90 is expected" in told(capsys, *[larger] * 6)
    hot = (drafter, ended((source, 2, 0, 600), (source, 2, 1, 400), temperature=1.5))
    assert told(capsys, *[hot] * 6) == ""


def test_steps_that_others_drafted_say_nothing_of_heads(capsys: pytest.CaptureFixture[str]) -> None:
    of_others = ended(("suffix", 3, 0, 900), ("suffix", 3, 1, 100), ("medusa + suffix", 3, 0, 100))
    assert told(capsys, *[("auto", of_others)] * 6) == ""


def test_a_drafter_that_is_never_right(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, *[("suffix", ended((None, 3, 0, 600)))] * 4)
    assert said.count("no draft token of 'suffix'") == 1
    assert "token of 'suffix' was" in told(capsys, *[("auto", ended(("suffix", 3, 0, 600)))] * 4)
    once = ended((None, 3, 0, 600), (None, 3, 1, 1))
    assert told(capsys, *[("suffix", once)] * 4) == ""
    assert told(capsys, *[("none", ended())] * 4) == ""  # which guesses nothing


def test_it_is_told_by_a_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untrained heads guess the token again that the model has just named."""
    monkeypatch.setattr(acceptance, "STEPS", 8)
    engine = engine_with_heads(lively_chat_base())
    engine.use_tree(PLAN)
    with live_server(engine) as live, live.http() as http:
        asked: dict[str, Any] = {"model": live.model, "prompt": "Rivers", "max_tokens": 24,
                                 "temperature": 0, "medusa_kit": {"drafter": "medusa"}}  # fmt: skip
        assert http.post("/v1/completions", json=asked).status_code == 200
        page = http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    (measured,) = families["medusa_kit_measured_acceptance_length"].samples
    assert measured.value == pytest.approx(1.6)
    (share,) = families["medusa_kit_share_of_measured_acceptance"].samples
    assert share.value < 0.7
    said = " ".join(capsys.readouterr().err.split())
    assert "is expected of trees as large" in said
    named = {sample.labels["drafter"] for sample in families["medusa_kit_never_accepted"].samples}
    assert ("was accepted in" in said) == bool(named)

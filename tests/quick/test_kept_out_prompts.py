"""Which prompts are kept out, and that they stay out."""

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_kit.errors import DataError
from medusa_kit.quick import prompts as quick_prompts
from medusa_kit.quick.prompts import Prompts, read_prompts


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"id": f"p{i}", "prompt": f"Question {i}?"} for i in range(first, first + count)]


def kept_out(prompts: Prompts) -> set[str | None]:
    return {row.id for row in [*prompts.calibration, *prompts.test]}


def test_a_tenth_is_kept_out_by_the_hash_of_its_id(tmp_path: Path) -> None:
    rows = numbered(200)
    first = read_prompts(write(tmp_path / "a.jsonl", rows))
    assert len(kept_out(first)) == 20
    assert (len(first.test), len(first.calibration), len(first.training)) == (8, 12, 180)
    again = read_prompts(write(tmp_path / "b.jsonl", rows[::-1]))
    assert kept_out(again) == kept_out(first)
    assert [row.id for row in again.training] == [row.id for row in first.training]
    edited = [{**row, "prompt": row["prompt"] + "?"} for row in rows]
    assert kept_out(read_prompts(write(tmp_path / "c.jsonl", edited))) == kept_out(first)
    assert [row.id for row in first.training] != sorted(str(row.id) for row in first.training)


def test_most_stay_out_when_prompts_are_added(tmp_path: Path) -> None:
    few = kept_out(read_prompts(write(tmp_path / "a.jsonl", numbered(100))))
    more = read_prompts(write(tmp_path / "b.jsonl", numbered(300)))
    assert len(few & kept_out(more)) > 0.5 * len(few)


@pytest.mark.parametrize(
    ("number", "kept", "tested"),
    [(8, 4, 2), (20, 5, 2), (32, 8, 4), (64, 16, 8), (150, 16, 8), (300, 30, 8), (600, 60, 12)],
)
def test_eight_are_measured_on_where_there_are_enough(
    tmp_path: Path, number: int, kept: int, tested: int
) -> None:
    prompts = read_prompts(write(tmp_path / "a.jsonl", numbered(number)))
    assert (len(kept_out(prompts)), len(prompts.test)) == (kept, tested)
    assert len(prompts.calibration) >= 2


def test_at_most_500(tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path / "a.jsonl", numbered(6000)))
    assert len(kept_out(prompts)) == quick_prompts.MAX_KEPT_OUT
    assert len(prompts.test) == quick_prompts.MAX_TESTED


def test_without_ids_the_text_decides(tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {i}?"} for i in range(60)]
    first = read_prompts(write(tmp_path / "a.jsonl", rows))
    again = read_prompts(write(tmp_path / "b.jsonl", rows[::-1]))
    texts = [{row.messages[0]["content"] for row in [*one.calibration, *one.test]}
             for one in (first, again)]  # fmt: skip
    assert texts[0] == texts[1]
    assert len(texts[0]) == 15


def test_the_same_text_under_another_id_is_not_trained_on(tmp_path: Path) -> None:
    rows = numbered(50)
    out = kept_out(read_prompts(write(tmp_path / "a.jsonl", rows)))
    copies = [{"id": f"copy-{row['id']}", "prompt": row["prompt"]} for row in rows]
    both = read_prompts(write(tmp_path / "b.jsonl", [*rows, *copies]))
    kept = {row.messages[0]["content"] for row in [*both.calibration, *both.test]}
    assert kept.isdisjoint(row.messages[0]["content"] for row in both.training)
    assert out


def test_a_question_is_asked_once(tmp_path: Path) -> None:
    """Greedy answers to it would be the same; and a copy in `test` would be calibrated on."""
    rows = [{"prompt": f"Question {i // 5}?"} for i in range(100)]
    found = read_prompts(write(tmp_path / "a.jsonl", rows))
    texts = [row.messages[0]["content"]
             for row in [*found.training, *found.calibration, *found.test]]  # fmt: skip
    assert (len(texts), len(set(texts)), found.repeated) == (20, 20, 80)


def test_rows_with_one_id_stay_together(tmp_path: Path) -> None:
    rows = [{"id": f"p{i // 2}", "prompt": f"Question {i}?"} for i in range(80)]
    prompts = read_prompts(write(tmp_path / "a.jsonl", rows))
    assert kept_out(prompts).isdisjoint(row.id for row in prompts.training)


def test_the_digest_tells_texts_and_ids_apart(tmp_path: Path) -> None:
    rows = numbered(20)
    digests = {
        read_prompts(write(tmp_path / f"{name}.jsonl", changed)).digest
        for name, changed in {
            "same": rows, "shorter": rows[:-1], "id": [{**rows[0], "id": "x"}, *rows[1:]],
            "text": [{**rows[0], "prompt": "x"}, *rows[1:]],
        }.items()
    }  # fmt: skip
    assert len(digests) == 4


def test_too_few_prompts_and_other_rows(tmp_path: Path) -> None:
    rows = [*numbered(20), {"goal": "?"}, {"prompt_ids": [1], "response_ids": [2],
                                          "finish_reason": "stop"}]  # fmt: skip
    found = read_prompts(write(tmp_path / "a.jsonl", rows))
    assert (found.skipped, found.first_skipped) == (
        2, "row 21: its format is unknown; its keys are 'goal'")  # fmt: skip
    with pytest.raises(DataError, match=r"unreadable rows: 20, the first is row 1: it is an"):
        read_prompts(write(tmp_path / "d.jsonl", rows[-1:] * 20))
    with pytest.raises(DataError, match="has 30 prompts, but only 1 different ids") as shared:
        read_prompts(write(tmp_path / "e.jsonl", [{**row, "id": "p"} for row in numbered(30)]))
    assert "leave ids out" in str(shared.value)
    with pytest.raises(DataError, match="has 7 unique prompts"):
        read_prompts(write(tmp_path / "b.jsonl", numbered(7)))
    with pytest.raises(DataError, match="has 1 unique prompts"):
        read_prompts(write(tmp_path / "c.jsonl", [{"id": "p", "prompt": "Same?"}] * 9))
    with pytest.raises(DataError, match="no data file at"):
        read_prompts(str(tmp_path / "nowhere.jsonl"))


@pytest.mark.parametrize(("number", "kept", "tested"), [(20, 4, 1), (100, 10, 2), (600, 60, 12)])
def test_earlier_runs_kept_out_fewer_of_few(
    tmp_path: Path, number: int, kept: int, tested: int
) -> None:
    """They may have trained on what would be kept out now."""
    source = write(tmp_path / "a.jsonl", numbered(number))
    now, earlier = read_prompts(source), read_prompts(source, earlier=True)
    assert (len(kept_out(earlier)), len(earlier.test)) == (kept, tested)
    assert kept_out(earlier) <= kept_out(now)
    assert {row.id for row in earlier.test} <= {row.id for row in now.test}
    assert (earlier.digest, earlier.earlier, now.earlier) == (now.digest, True, False)

"""A store of past answers: kept across requests and engines, capped, and never damaged further."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from support.small_engines import build_engine, endless_base, random_prompt
from support.states import begun, state_from

from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.text.past_answers import FORMAT, VERSION
from medusa_kit.errors import CheckpointError, ConfigError
from medusa_kit.infer.decode.drafter import RequestText


def store_engine(vocab_size=40):
    return build_engine(_base(vocab_size))


_base = cache(endless_base)


def drafter_with(**options):
    return build_drafter("suffix", DraftContext(store_engine().verifier), options)


def guessed(drafter, tokens, root):
    state = state_from([tokens], [root], torch.zeros(1, 1))
    return drafter.guess(begun(drafter, state))[0]


def ended(drafter, *answers):
    """Requests with these answers end, and one that was cancelled."""
    requests = [RequestText(token_ids=list(one), finish_reason="stop") for one in answers]
    drafter.finish([*requests, RequestText(token_ids=[7, 7, 7], finish_reason="cancelled")])


def with_store(path, **options):
    return {"drafter": "suffix", "drafter_options": {"store": str(path), **options}}


def test_a_store_serves_the_next_request_and_the_next_engine(tmp_path):
    path = tmp_path / "new" / "past.npz"
    prompt = random_prompt(6, 4, vocab_size=40)
    first = store_engine().generate(prompt, max_new_tokens=40, drafter="suffix")
    engine = store_engine()
    results = [engine.generate(prompt, max_new_tokens=40, **with_store(path)) for _ in range(2)]
    results.append(store_engine().generate(prompt, max_new_tokens=40, **with_store(path)))
    assert [r.token_ids for r in results] == [first.token_ids] * 3
    assert results[0].stats.num_steps == first.stats.num_steps  # nothing stored yet
    assert max(r.stats.num_steps for r in results[1:]) < first.stats.num_steps / 2
    with np.load(path) as stored:
        assert stored["lengths"].tolist() == [40]  # the same answer is kept once
        assert stored["tokens"].tolist() == first.token_ids


def test_the_oldest_answers_are_dropped_beyond_the_cap(tmp_path):
    path = tmp_path / "past.npz"
    drafter = drafter_with(store=str(path), store_tokens=10)
    ended(drafter, [1, 2, 3, 4], [5, 6, 7, 8])
    ended(drafter, [1, 2, 3, 4])  # is the newest now
    ended(drafter, [9, 9, 9])
    assert [answer.tolist() for answer in drafter.past] == [[1, 2, 3, 4], [9, 9, 9]]
    ended(drafter, list(range(12)))
    other = drafter_with(store=str(path), store_tokens=10)
    assert [answer.tolist() for answer in other.past] == [list(range(2, 12))]


def test_what_another_process_wrote_is_kept(tmp_path):
    path = tmp_path / "past.npz"
    ours, theirs = [drafter_with(store=str(path)) for _ in range(2)]
    ended(theirs, [1, 2])
    ended(ours, [3, 4])
    ended(theirs, [5, 6])
    third = drafter_with(store=str(path))
    assert sorted(answer.tolist() for answer in third.past) == [[1, 2], [3, 4], [5, 6]]


def test_answers_of_a_sibling_with_more_rows_stay_and_are_not_drafted_from(tmp_path, capsys):
    """Padded rows, which a tokenizer does not count. Both ways to index: a few, and all sorted."""
    path = tmp_path / "answers.npz"
    sibling = {"format": FORMAT, "version": VERSION, "tokenizer": "40 tokens"}
    for count in (2, 400):
        answers = [[7, 8, 40 + i % 3, 9] for i in range(count)] + [[7, 8, 9]]
        np.savez(path, header=np.array(json.dumps(sibling)), tokens=np.concatenate(answers),
                 lengths=np.array([len(answer) for answer in answers]))  # fmt: skip
        drafter = drafter_with(store=str(path), store_tokens=10_000)
        said = " ".join(capsys.readouterr().err.split())
        assert "past answers hold tokens from 40 on, which this model lacks" in said
        tokens = guessed(drafter, [7], 8).tokens
        assert 9 in tokens
        assert max(tokens) < 40
        ended(drafter, [1, 2, 3])
        with np.load(path) as stored:
            assert {40, 3} <= set(stored["tokens"].tolist()), "kept for the sibling"
        engine = store_engine()
        plain = engine.generate([7, 8, 39], max_new_tokens=20, drafter="none").token_ids
        found = engine.generate([7, 8, 39], max_new_tokens=20, **with_store(path)).token_ids
        assert found == plain
        path.unlink()


def test_another_tokenizers_and_damaged_stores_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "past.npz"
    ended(drafter_with(store=str(path)), [1, 2, 3])
    good = path.read_bytes()
    with pytest.raises(CheckpointError, match="another tokenizer"):
        store_engine(12).generate([3], max_new_tokens=3, **with_store(path))
    assert path.read_bytes() == good
    running = drafter_with(store=str(path))
    with np.load(path) as arrays:
        ours = dict(arrays)
    contradicting = [
        {"tokens": ours["tokens"].astype(float)}, {"lengths": ours["lengths"][:, None]},
        {"lengths": ours["lengths"] + 1}, {"tokens": -ours["tokens"]},
        {"header": np.asarray(str(ours["header"]).replace('"version": 1', '"version": 99'))},
    ]  # fmt: skip
    damages = [b"", b"not a store", good[: len(good) // 2]]
    for changed in contradicting:
        np.savez(path, **ours | changed)
        damages.append(path.read_bytes())
    for damaged in damages:
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="not a medusa-kit store") as error:
            store_engine().generate([3], max_new_tokens=3, **with_store(path))
        assert error.value.hint
        ended(running, [4, 5])  # damaged while a request ran: its answer still comes
        assert "not saved" in running.notes[-1]
        assert path.read_bytes() == damaged
    with pytest.raises(ConfigError, match="folder"):
        store_engine().generate([3], max_new_tokens=3, **with_store(tmp_path))


def test_large_stores_are_sorted_and_matched_as_small_ones_are(tmp_path):
    """Answers move from the automaton to the sorted index; guesses stay the same."""
    waiting = drafter_with(store=str(tmp_path / "a.npz"), store_tokens=100_000)
    sorted_ = drafter_with(store=str(tmp_path / "b.npz"), store_tokens=5_000)
    answers = [random_prompt(30, seed, vocab_size=40) for seed in range(12)]
    for drafter in (waiting, sorted_):
        drafter.past.add(answers)
    assert waiting.past.recent.num_tokens == 360
    assert sorted_.past.recent.num_tokens == 0
    for drafter in (waiting, sorted_):
        tree = guessed(drafter, answers[7][8:16], answers[7][16])
        assert tree.tokens[1:3] == answers[7][17:19]
        assert tree.parents[1:3] == [0, 1]
        assert tree.chances[1] == pytest.approx(1 / 3.5, abs=0.05)  # seen once after nine tokens
        assert tree.keys[1] == ("past", 2)

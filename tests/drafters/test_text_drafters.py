"""Drafters that copy from text and tables: right places, right counts, unchanged answers."""

import math
from array import array
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_engines import build_engine, endless_base, random_prompt
from support.states import begun, state_from
from support.steps import result_of
from support.tiny_models import CONTEXT, tiny_base

from medusa_kit.drafters.estimates import AcceptanceEstimate
from medusa_kit.drafters.factory import DraftContext, build_drafter
from medusa_kit.drafters.memory import Memory
from medusa_kit.drafters.text.recycling import RANK_CHANCES, likeliest
from medusa_kit.drafters.text.suffix_array import SuffixArray
from medusa_kit.drafters.text.suffix_automaton import START, SuffixAutomaton
from medusa_kit.infer.decode.drafter import State
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.forest import Forest
from medusa_kit.settings.sampling import SamplingParams

CPU = torch.device("cpu")
NAMES = ["prompt-lookup", "suffix", "recycling"]
TOKENS = st.integers(0, 2)
TEXTS = st.lists(st.lists(TOKENS, max_size=12), min_size=1, max_size=3)


def drafter_for(name, **options):
    """Without a model: these need none."""
    context = SimpleNamespace(device=CPU, verifier=None, memory=Memory())
    return build_drafter(name, context, options)


def chain(tree):
    """The tokens of a tree without branches."""
    assert tree.parents == [-1, *range(tree.num_nodes - 1)]
    return tree.tokens


def guessed(drafter, tokens, root):
    state = state_from([tokens], [root], torch.zeros(1, 1))
    return drafter.guess(begun(drafter, state))[0]


@pytest.mark.parametrize("name", ["suffix", "recycling"])
def test_paths_that_do_not_gain_are_not_guessed(name):
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2]
    wide, narrow = drafter_for(name, num_nodes=12), drafter_for(name, num_nodes=12)
    least = 0.1
    narrow.set_min_chance(least, AcceptanceEstimate())
    every, some = guessed(wide, text, 3), guessed(narrow, text, 3)
    chances = dict(every.by_chance()[1:])
    kept = list(zip(some.parents[1:], some.tokens[1:], strict=True))
    likely = [(every.parents[n], every.tokens[n]) for n in sorted(chances) if chances[n] >= least]
    assert kept
    assert kept == likely[: len(kept)]  # what is left of a chance below the least is not counted
    assert len(likely) < len(chances)


def test_rare_followers_of_a_frequent_token_are_not_looked_for_where_nodes_are_free():
    text = [token for number in range(10, 60) for token in (7, number)]
    drafter = drafter_for("suffix", num_nodes=12)
    drafter.set_min_chance(0.0, AcceptanceEstimate())
    assert guessed(drafter, text, 7).num_nodes == 1
    assert guessed(drafter, [*text, *[7, 5] * 40], 7).tokens[:2] == [7, 5]


# Prompt lookup


def test_the_longest_ngram_and_its_latest_place_decide():
    drafter = drafter_for("prompt-lookup", num_tokens=2)
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 2, 3, 6, 0, 1, 2]
    tree = guessed(drafter, text, 3)
    assert chain(tree) == [3, 5, 9]  # 1 2 3 the second time, not 2 3 6
    assert tree.keys[1:] == [("prompt-lookup", 3, 1), ("prompt-lookup", 3, 2)]
    assert tree.chances[1] < tree.chances[2]
    assert chain(guessed(drafter, [7, 8, 7], 5)) == [5]


def test_a_copy_that_reaches_the_end_goes_on_with_itself():
    drafter = drafter_for("prompt-lookup", num_tokens=7)
    assert chain(guessed(drafter, [5, 1, 2, 3, 1, 2], 3)) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert chain(guessed(drafter, [4], 4)) == [4] * 8


@pytest.mark.parametrize("name", ["prompt-lookup", "suffix"])
def test_text_that_is_read_step_by_step_is_the_same_text(name):
    """Rows of different length that advance by different amounts; one leaves."""
    drafter = drafter_for(name)
    texts = [random_prompt(length, length, vocab_size=7) for length in (60, 45, 52)]
    ends = [5, 9, 3]
    state = state_from(
        [t[:e] for t, e in zip(texts, ends, strict=True)], [0] * 3, torch.zeros(3, 1)
    )
    rows = [0, 1, 2]
    every = begun(drafter, state).requests
    for step in range(8):
        if step == 4:
            rows = [0, 2]
            drafter.finish([every[1]])
        for row in rows:
            every[row].text, every[row].root = texts[row][: ends[row]], texts[row][ends[row]]
        state = State([every[row] for row in rows])
        for row, tree in zip(rows, drafter.guess(state), strict=True):
            fresh = guessed(drafter_for(name), texts[row][: ends[row]], texts[row][ends[row]])
            assert (tree.tokens, tree.parents) == (fresh.tokens, fresh.parents)
            assert tree.chances == fresh.chances
            ends[row] += 1 + (step + row) % 3
    again = drafter.guess(state)  # nothing has happened since: nothing is read twice
    assert [t.tokens for t in again] == [t.tokens for t in drafter.guess(state)]


# Suffixes


def followers(texts, context, max_match):
    """By brute force: {length of an end of `context`: how often each token followed it}."""
    found = {}
    for length in range(1, min(max_match, len(context)) + 1):
        end = context[-length:]
        counts = Counter(
            text[i + length]
            for text in texts
            for i in range(len(text) - length)
            if text[i : i + length] == end
        )
        if counts:
            found[length] = dict(counts)
    return found


def check_levels(levels, expected):
    """Every length's counts are those of the level of its state, the next longer one given."""
    given_levels = dict(levels)
    assert list(given_levels) == sorted(given_levels, reverse=True)
    assert max(given_levels, default=0) == max(expected, default=0)
    for length, counts in expected.items():
        assert given_levels[min(n for n in given_levels if n >= length)] == counts


@settings(deadline=None, derandomize=True, max_examples=150)
@given(TEXTS, st.lists(st.tuples(TOKENS, TOKENS), max_size=6), st.integers(1, 5))
def test_the_automaton_counts_as_brute_force_does(texts, steps, max_match):
    """While it reads, and for another text, whose cursor stays valid as the automaton grows."""
    automaton, known = SuffixAutomaton(max_match), []
    for text in texts:
        automaton.restart()
        known.append([])
        for token in text:
            automaton.read(token)
            known[-1].append(token)
            check_levels(automaton.levels(automaton.end), followers(known, known[-1], max_match))
    cursor, other = START, []
    for token, read in steps:
        cursor = automaton.advance(cursor, token)
        other.append(token)
        check_levels(automaton.levels(cursor), followers(known, other, max_match))
        automaton.read(read)
        known[-1].append(read)


@settings(deadline=None, derandomize=True, max_examples=120)
@given(TEXTS, st.lists(TOKENS, max_size=9), TOKENS, st.integers(1, 5))
def test_the_suffix_array_finds_the_longest_match_and_counts(texts, context, ahead, max_match):
    index = SuffixArray([array("i", text) for text in texts], max_match)
    known = {tuple(t[i:j]) for t in texts for j in range(len(t) + 1) for i in range(j)}
    lengths = range(1, min(max_match, len(context)) + 1)
    ranges = index.match(array("i", context), len(context))
    longest = max((n for n in lengths if tuple(context[-n:]) in known), default=0)
    assert [n for _, _, n in ranges] == sorted({longest, *range(1, min(longest, 3))} - {0})[::-1]
    expected = followers(texts, context, max_match)
    assert dict(index.levels(ranges)) == {n: expected[n] for _, _, n in ranges if n in expected}
    following = followers(texts, [*context, ahead], max_match + 1)
    longer = index.advance(ranges, ahead)
    assert [n for *_, n in longer] == [n + 1 for *_, n in ranges if ahead in expected.get(n, ())]
    for one in longer:
        counts = next((counts for _, counts in index.levels((one,))), {})
        assert counts == following.get(one[2], {})


def test_chances_follow_the_formula():
    """3 of 4 times 7, once 8; the shorter match adds what followed it elsewhere."""
    drafter = drafter_for("suffix", num_nodes=4)
    text = [1, 2, 7, 0, 1, 2, 7, 3, 1, 2, 7, 4, 1, 2, 8, 5, 2, 9, 6, 1]
    tree = guessed(drafter, text, 2)
    by_token = {tree.tokens[n]: tree.chances[n] for n in range(1, 4) if tree.parents[n] == 0}
    rest = 2.2 / 6.2  # "1 2" four times, two ways, each 1.1; "2" five times, three ways, each 2.2
    assert by_token[7] == pytest.approx(3 / 6.2 + rest * 3 / 11.6)
    assert by_token[8] == pytest.approx(1 / 6.2 + rest * 1 / 11.6)
    assert tree.keys[1:3] == [("suffix", 5), ("suffix", 1)]
    assert len(by_token) == 2 or 9 in by_token


def test_a_token_that_always_went_on_differently_is_not_copied_from():
    rare, common = [1, 2, 3, 4, 5], [1, 2, 3, 1, 4, 5, 1, 6, 7, 1, 8, 9]
    first = guessed(drafter_for("suffix", num_nodes=2), rare, 1)
    assert first.tokens[1] == 2
    assert first.chances[1] > 0.3
    assert guessed(drafter_for("suffix", num_nodes=2), common, 1).num_nodes == 2
    assert max(guessed(drafter_for("suffix", num_nodes=9), common, 1).chances[1:]) < 0.1


def test_a_loop_is_predicted_beyond_its_last_turn():
    tree = guessed(drafter_for("suffix", num_nodes=9), [1, 2, 3] * 6 + [1, 2], 3)
    assert chain(tree) == [3, 1, 2, 3, 1, 2, 3, 1, 2]


# Recycling


def test_the_likeliest_are_those_of_topk():
    for vocab_size in (5, 64, 65, 1000):
        logits = torch.randn(2, 3, vocab_size, generator=torch.Generator().manual_seed(1))
        for count in (1, 4, 8):
            expected = logits.topk(min(count, vocab_size)).indices
            assert torch.equal(likeliest(logits, count), expected)


def test_the_table_has_what_was_last_likely_and_the_tree_the_best_paths():
    drafter = drafter_for("recycling", num_nodes=4, width=2)
    tree = guessed(drafter, [1, 2, 1, 3, 1], 4)
    assert drafter.table == {1: [4, 3], 2: [1], 3: [1]}
    assert tree.tokens == [4]  # nothing followed 4 yet
    tree.add(0, 5, 0.5)
    tree.add(0, 6, 0.5)
    logits = torch.zeros(1, 3, 9)
    logits[0, 0, [6, 5]] = torch.tensor([2.0, 1.0])
    logits[0, 1, [7, 4]] = torch.tensor([2.0, 1.0])
    logits[0, 2, [4, 8]] = torch.tensor([2.0, 1.0])
    step = result_of(Forest.of_drafts([tree], CPU), [[2]], [4], logits=logits)
    drafter.observe(step)
    assert drafter.table == {1: [4, 3], 2: [1], 3: [1], 4: [6, 5], 5: [7, 4], 6: [4, 8]}
    state = state_from([[1, 2, 1, 3, 1, 4, 6]], [4], torch.zeros(1, 1))
    guess = drafter.guess(state)[0]
    assert (guess.tokens, guess.parents) == ([4, 6, 4, 5], [-1, 0, 1, 0])
    assert guess.keys[1:] == [("recycling", 0, 1), ("recycling", 0, 2), ("recycling", 1, 1)]


def test_the_best_tree_has_the_largest_sum_of_path_chances():
    drafter = drafter_for("recycling", num_nodes=6, width=3)
    drafter.table = {token: [3 * token + r for r in (1, 2, 3)] for token in range(200)}
    tree = drafter.guess(state_from([[]], [0], torch.zeros(1, 1)))[0]
    chances = RANK_CHANCES[:3]
    paths = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    paths += [(*p, c) for p in paths if len(p) == 2 for c in range(3)]
    values = sorted((math.prod(chances[r] for r in path) for path in paths), reverse=True)
    assert sum(c for _, c in tree.by_chance()) - 1 == pytest.approx(sum(values[:5]))


# Through the engine


@pytest.fixture(scope="module")
def endless():
    return build_engine(endless_base(12))


def plain(base, prompt, tokens):
    ids = torch.tensor([prompt])
    out = base.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_those_of_transformers(endless, name):
    """Alone and in a batch; rows leave at different times; guesses are right now and then."""
    prompts = [random_prompt(length, length, vocab_size=12) for length in (30, 4, 17)]
    lengths = [24, 40, 33]
    expected = [plain(endless.base, p, n) for p, n in zip(prompts, lengths, strict=True)]
    steps = 0
    for prompt, answer in zip(prompts, expected, strict=True):
        result = endless.generate(prompt, max_new_tokens=len(answer), drafter=name)
        assert result.token_ids == answer
        assert result.stats.drafter == name
        steps += result.stats.num_steps
    assert steps < sum(lengths) - 6
    context = DraftContext(endless.verifier, batch_size=3)
    requests = [
        make_request(endless.verifier, prompt, SamplingParams(), length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    for _ in Scheduler(endless.verifier).run(requests, build_drafter(name, context)):
        pass
    assert [request.token_ids for request in requests] == expected


def test_the_contexts_end_and_a_stop_token_inside_a_path(tmp_path):
    """The second request knows the first one's answer, beyond where it now has to stop."""
    engine = build_engine(tiny_base("llama"))
    engine.base.model.generation_config.eos_token_id = None
    prompt = random_prompt(CONTEXT - 30, 3)
    expected = plain(engine.base, prompt, 30)
    drafting = {"drafter": "suffix", "drafter_options": {"store": str(tmp_path / "past.npz")}}
    full = engine.generate(prompt, max_new_tokens=99, **drafting)
    assert (full.token_ids, full.finish_reason) == (expected, "length")
    place = next(i for i, token in enumerate(expected) if i > 12 and token not in expected[:i])
    engine.base.model.generation_config.eos_token_id = expected[place]
    stopped = engine.generate(prompt, max_new_tokens=99, **drafting)
    assert (stopped.token_ids, stopped.finish_reason) == (expected[: place + 1], "stop")
    assert stopped.stats.num_steps < 0.7 * place


def test_repeated_text_is_accepted_in_long_runs(endless):
    """A random model of twelve tokens soon repeats a loop, which is predicted to full depth."""
    prompt = random_prompt(20, 8, vocab_size=12)
    for name in ("prompt-lookup", "suffix"):
        stats = endless.generate(prompt, max_new_tokens=100, drafter=name).stats
        assert len(stats.acceptance_by_depth) == 7, name
        assert stats.acceptance_length > 2, name

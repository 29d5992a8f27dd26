"""The list: which files are mutated, which tests are to notice, and how mutants are drawn."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.mutants import cpp_source, python_source

LIST = Path(__file__).with_name("mutants.json")
SEED = 45
INFER, DECODE = "medusa_kit/infer", "medusa_kit/infer/decode"
ACCEPT = "tests/infer/decode/accept"
LOST = ("fused", "overlap", "prefix_hidden")  # what lost its comparison, and goes
EXACT = ["tests/exactness/test_greedy.py"]


@dataclass(frozen=True)
class Group:
    """Files of one concern: how many mutants they get, and the tests, the quickest first."""

    count: int
    files: Sequence[str]
    tests: Sequence[str]


GROUPS = {
    "accept": Group(
        12,
        [f"{DECODE}/accept/{name}.py" for name in ("rules", "scored_tree", "draws")],
        [f"{ACCEPT}/test_rules.py", f"{ACCEPT}/test_draws.py", "tests/infer/test_step_trees.py",
         *EXACT, "tests/exactness/test_typical.py", "tests/exactness/test_rejection.py"],
    ),
    "cache": Group(
        13,
        [f"{INFER}/tree_cache.py", f"{DECODE}/prefix_cache/prefixes.py"],
        ["tests/infer/test_tree_cache.py", "tests/infer/decode/test_prefixes.py",
         "tests/infer/test_verifier.py", "tests/infer/test_cache_memory.py", *EXACT],
    ),
    "masks": Group(
        13,
        ["medusa_kit/tree/candidate_tree.py", f"{INFER}/tree_step.py", f"{INFER}/host_tree.py",
         f"{INFER}/attention/sdpa.py", f"{INFER}/attention/merge.py"],
        ["tests/tree/test_candidate_tree.py", "tests/infer/test_tree_step.py",
         "tests/infer/attention/test_attention.py", "tests/infer/test_verifier.py", *EXACT,
         "tests/infer/device/test_fixed_shapes.py"],
    ),
    "losses": Group(
        12,
        ["medusa_kit/train/loss/loss.py", "medusa_kit/train/loss/chunked.py"],
        ["tests/train/loss/test_loss.py"],
    ),
    "scheduler": Group(
        13,
        [f"{DECODE}/{name}.py" for name in
         ("schedule", "batch", "group", "scheduler", "threaded/scheduler_thread",
          "threaded/submission")],
        [*(f"tests/infer/decode/{name}.py" for name in
           ("test_schedule", "test_scheduler", "test_failed_requests", "test_host_waits",
            "threaded/test_scheduler_thread")), *EXACT],
    ),
    "sampling": Group(
        12,
        [f"{DECODE}/accept/{name}.py" for name in
         ("token_choice", "logits_processing", "one_thread")] + ["medusa_kit/settings/sampling.py"],
        # The first is what the second was called when the list was drawn.
        [f"{ACCEPT}/test_token_choice.py", f"{ACCEPT}/test_sampler.py",
         "tests/exactness/test_typical.py", f"{ACCEPT}/test_one_thread.py",
         f"{ACCEPT}/test_draws.py", "tests/exactness/test_sampling.py"],
    ),
    "c++": Group(
        25,
        [f"{INFER}/cpu/{name}.h" for name in
         ("attention", "attention_parts", "copying", "dots_avx2", "draw", "heads", "integers",
          "matmul", "matrix", "norms", "recurrent", "rows", "shares", "step", "trees")]
        + [f"{INFER}/cpu/decoder.cpp"],
        [f"tests/infer/cpu/test_native{name}.py" for name in
         ("", "_heads", "_trees", "_recurrent")]
        + ["tests/infer/cpu/test_int8_weights.py", "tests/infer/cpu/test_long_prefixes.py",
           "tests/infer/cpu/test_activations.py", f"{ACCEPT}/test_draws.py"],
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    number: int
    group: str
    kind: str
    file: str
    function: str
    occurrence: int  # among the function's lines with this text, from 0
    old: str
    new: str
    tests: list[str]


def changes_of(file: str, source: str) -> list[python_source.Change]:
    return (python_source if file.endswith(".py") else cpp_source).changes(source)


def draw(tree: Path, seed: int = SEED) -> list[Mutant]:
    """Of each group, kinds in turn, at most one of a line."""
    found: list[Mutant] = []
    for name, group in GROUPS.items():
        read = {file: changes_of(file, (tree / file).read_text("utf-8")) for file in group.files}
        left = [(file, change) for file, changes in read.items() for change in changes
                if not any(word in f"{change.function} {change.old}" for word in LOST)]  # fmt: skip
        kinds, drawn = sorted({change.kind for _, change in left}), random.Random(f"{seed} {name}")
        for number in range(group.count):
            kind = kinds[number % len(kinds)]
            of_kind = [one for one in left if one[1].kind == kind] or left
            file, change = drawn.choice(of_kind)
            left = [one for one in left if (one[0], one[1].line) != (file, change.line)]
            same = {other.line for other in read[file] if _alike(other, change)}
            occurrence = sorted(same).index(change.line)
            found.append(
                Mutant(len(found) + 1, name, change.kind, file, change.function, occurrence,
                       change.old, change.new, list(group.tests))
            )  # fmt: skip
    return found


def _alike(one: python_source.Change, other: python_source.Change) -> bool:
    return (one.function, one.old, one.new) == (other.function, other.old, other.new)


def write_list(mutants: Sequence[Mutant], path: Path = LIST) -> None:
    """One a line. Tests are the group's, so that they are written once."""
    tests = {name: list(group.tests) for name, group in GROUPS.items()}
    rows = [{k: v for k, v in asdict(one).items() if k != "tests"} for one in mutants]
    body = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
    written = json.dumps(tests, indent=1)
    path.write_text(f'{{"tests": {written},\n"mutants": [\n{body}\n]}}\n', encoding="utf-8")


def read_list(path: Path = LIST) -> list[Mutant]:
    read = json.loads(path.read_text(encoding="utf-8"))
    return [Mutant(**row, tests=read["tests"][row["group"]]) for row in read["mutants"]]

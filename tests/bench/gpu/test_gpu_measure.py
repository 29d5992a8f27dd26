"""The first measurements on a GPU, on the CPU: dry runs walk through them, and parts do what they
say."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.small_engines import build_engine

from benchmarks.gpu import correctness, processes, report, wheels
from benchmarks.gpu.commands import COMMANDS, GOALS, GOALS_OF, measure, parts
from benchmarks.gpu.correctness import suite_part
from benchmarks.gpu.known_text import KnownText, share_for, tree_of
from benchmarks.gpu.memory import products_of
from benchmarks.gpu.report import NO_MEASUREMENT
from benchmarks.gpu.runner import DeviceLost
from benchmarks.gpu.tables import TABLES, print_report
from benchmarks.gpu.workbench import Workbench
from medusa_kit import console
from medusa_kit.base import fingerprint
from medusa_kit.bench.gpu.setup import describe
from medusa_kit.bench.gpu.shapes import (
    EXACTNESS,
    LLAMA_1B,
    LLAMA_8B,
    SMOLLM2_135M,
    random_base,
    successors,
    tiny,
)
from medusa_kit.bench.oracle import Oracle
from medusa_kit.errors import MedusaKitError
from medusa_kit.infer import mkl_linear as packed_linear
from medusa_kit.infer.attention import triton_backend

# torch's own, when dynamo is imported
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CPU = torch.device("cpu")
TINY = tiny(SMOLLM2_135M)
# Packages that the machine of a GPU may lack: a borrowed one has no network to get them.
NOT_NEEDED = ("xxhash", "psutil", "gguf", "datasets", "deepspeed", "wandb", "peft", "matplotlib",
              "flash_attn", "vllm")  # fmt: skip
JUNIT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><skipped/></testcase>{more}
</testsuite></testsuites>"""


def suite_that_says(patch: pytest.MonkeyPatch, junit: str) -> None:
    """In place of pytest's own process."""

    def run(command: list[str], *_: Any) -> bool:
        (option,) = [word for word in command if word.startswith("--junit-xml=")]
        Path(option.partition("=")[2]).write_text(junit)
        return False

    patch.setattr(correctness, "_run", run)


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The JSON report of each command's dry run, but for other processes."""
    folder = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:  # an interpreter has other tests, and no bfloat16
        patch.setattr(triton_backend, "interpreting", lambda: False)
        patch.setattr(processes, "finished", lambda *_: 'a warning\n{"ms": 2.0}\n')
        suite_that_says(patch, JUNIT.format(more=""))
        for name in NOT_NEEDED:
            patch.setitem(sys.modules, name, None)
        for command in COMMANDS:
            path = folder / f"command_{command}.json"
            measure(command, CPU, dry_run=True, path=path, minutes=30.0)
    files = sorted(folder.glob("*.json"))
    return dict(enumerate((json.loads(path.read_text()) for path in files), 1))


def done(walked: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    found = [part for one in walked.values() for part in one["parts"]]
    return [part for part in found if part["status"] == "done"]


# The dry run.


def test_a_dry_run_walks_through_every_part(walked: dict[int, dict[str, Any]]) -> None:
    for command, told in walked.items():
        found = {part["name"]: part for part in told["parts"]}
        assert list(found) == [part.name for part in parts(command, small=False)]
        without = {name: p for name, p in found.items() if p["status"] != "done"}
        assert all(part["status"] == "cannot" for part in without.values()), without
        assert all("triton" in name for name in without), without
        assert told["finished"]
        assert "running" not in told
    assert {part["kind"] for part in done(walked)} == set(TABLES)


def test_nothing_of_a_dry_run_counts_as_measured(walked: dict[int, dict[str, Any]]) -> None:
    for told in walked.values():
        assert told["dry_run"]
        assert told["note"] == NO_MEASUREMENT
        assert not any(part["measured"] for part in told["parts"])
    assert [goal["met"] for goal in walked[GOALS_OF]["goals"]] == [None] * len(GOALS)
    assert not walked[1]["goals"]


def test_goals_name_parts_and_figures_that_there_are(walked: dict[int, dict[str, Any]]) -> None:
    found = {part["name"]: part["figures"] for part in walked[GOALS_OF]["parts"]}
    for goal in walked[GOALS_OF]["goals"]:
        assert goal["part"] in found
        figures = found[goal["part"]]
        if "host syncs" in goal["goal"]:  # which a CPU has none of
            assert goal["figure"] is figures["host_syncs"] is None
        else:
            name = "against_transformers" if "transformers" in goal["goal"] else "times_floor"
            assert goal["figure"] == figures[name] > 0


def test_every_way_ran_as_it_is_called(walked: dict[int, dict[str, Any]]) -> None:
    found = [part for part in done(walked) if "PDL" not in part["name"]]
    for part in (part for part in found if "medusa-kit," in part["name"]):
        assert ("fixed shapes" in part["figures"]["run_by"]) == ("(captured)" in part["name"])
    for part in (part for part in found if part["kind"] == "steps"):
        run_by = part["figures"]["run_by"]
        assert ("fixed shapes" in run_by) == ("(loop)" not in part["name"])
        assert run_by.startswith("torch.compile") == ("compiled" in part["name"])
        assert ("device_ms" in part["figures"]) == ("(loop)" not in part["name"])
    for part in (part for part in found if part["kind"] == "exactness"):
        assert part["figures"]["identical"] == part["figures"]["answers"] == 16
        assert part["figures"]["acceptance_length"] > 1.1
    for part in (part for part in found if part["kind"] in ("load", "captures")):
        loose = "loose_forwards" if part["kind"] == "load" else "loose"
        assert part["figures"][loose] == 0, part["name"]


def test_a_load_is_answered_whole(walked: dict[int, dict[str, Any]]) -> None:
    for part in (part for part in done(walked) if part["kind"] == "load"):
        figures = part["figures"]
        assert figures["answers"] == figures["clients"]
        assert figures["tokens"] == 8 * figures["answers"]
        assert 0 < figures["first_token_ms"] <= figures["first_token_most_ms"]


def test_a_part_with_another_environment_has_the_floor_of_this_one(
    walked: dict[int, dict[str, Any]],
) -> None:
    figures = {part["name"]: part["figures"] for part in walked[3]["parts"]}
    (name,) = [one for one in figures if one.endswith("64 (captured, compiled)")]
    alone = figures[f"{name}, PDL"]
    assert alone["times_floor"] == 2.0 / figures[name]["floor_ms"]


def test_what_takes_long_or_leaves_a_trace_comes_after_the_rest() -> None:
    """A profiler may slow down what is timed later; correctness is first of all."""
    assert [part.kind for part in parts(1, small=False)][:2] == ["tests", "bandwidth"]
    for command in (2, 5):
        kinds = [part.kind for part in parts(command, small=False)]
        assert kinds.index("kernels") == len(kinds) - 1


def test_one_part_can_be_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = importlib.import_module("benchmarks.gpu.__main__").main
    name = parts(2, small=True)[0].name
    arguments = ["2", "--dry-run", "--output", str(tmp_path)]
    assert main([*arguments, "--part", name]) == 0
    assert json.loads(capsys.readouterr().out)["gb_per_second"] > 0
    assert main([*arguments, "--part", "nothing"]) == 2
    assert "command 2 has no part 'nothing'" in capsys.readouterr().err
    assert main([*arguments, "--only", "BANDwidth"]) == 0
    assert "Memory, GB/s (no measurement)" in capsys.readouterr().out
    setup = json.loads((tmp_path / "command_2.json").read_text())["setup"]
    assert "compute_capability" in setup  # of the stand-in for CUDA
    assert main([*arguments, "--only", "nothing"]) == 2
    assert "no part's name contains --only 'nothing'" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["2", "--output", str(tmp_path)]) == 1
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_a_lost_device_hands_over_to_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("benchmarks.gpu.__main__")

    def lost(*_: object) -> None:
        raise DeviceLost("CUDA error")

    def took_over(program: str, command: list[str]) -> None:
        taken.append(command)
        raise SystemExit(0)

    taken: list[list[str]] = []
    monkeypatch.setattr(module, "measure", lost)
    monkeypatch.setattr(module.os, "execv", took_over)
    arguments = ["3", "--dry-run", "--output", str(tmp_path)]
    with pytest.raises(SystemExit):
        module.main(arguments)
    (command,) = taken
    assert command[:-2] == [sys.executable, "-m", "benchmarks.gpu", *arguments, "--continue"]
    assert module._parser().parse_args(command[3:]).minutes == pytest.approx(8.5, abs=0.5)


@pytest.mark.parametrize("constraints", ["pydantic==2.1\nother==3\n", "other==3\n"])
def test_what_a_machine_lacks_is_pinned_where_we_pin_it(constraints: str) -> None:
    wanted = ["pydantic==2.1" if "pydantic" in constraints else "pydantic"]
    assert wheels.pinned(constraints) == [*wanted, "annotated-types", "typing-inspection"]
    metadata = "Requires-Dist: pydantic\nRequires-Dist: pydantic-core==2.50.4\n"
    assert wheels.core_of(metadata) == "pydantic-core==2.50.4"
    with pytest.raises(SystemExit, match="names no version of pydantic-core"):
        wheels.core_of("Requires-Dist: pydantic-core\n")


@pytest.mark.parametrize("kind", ["failure", "error"])
def test_a_test_that_fails_is_a_part_that_fails(
    kind: str, bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite_that_says(monkeypatch, JUNIT.format(more=""))
    assert suite_part().run(bench) == {"tests": 2, "passed": 1, "skipped": 1, "stopped": False}
    suite_that_says(monkeypatch, JUNIT.format(more=f'<testcase name="c"><{kind}/></testcase>'))
    with pytest.raises(MedusaKitError, match=r"1 of 3 tests failed .1 passed.: c"):
        suite_part().run(bench)


def test_a_suite_that_takes_too_long_reports_what_it_has_done(tmp_path: Path) -> None:
    script = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('interrupted')"
    said = tmp_path / "said.txt"
    assert correctness._run([sys.executable, "-c", script], said, 2.0)
    assert said.read_text() == "interrupted\n"
    assert not correctness._run([sys.executable, "-c", "print('done')"], said, 60.0)
    assert said.read_text() == "done\n"


def test_a_process_that_fails_says_why() -> None:
    assert processes.finished(["-c", "import os; print(os.environ['A'])"], 60, {"A": "b"}) == "b\n"
    with pytest.raises(MedusaKitError, match="exit code 3: no memory"):
        processes.finished(["-c", "import sys; print('no memory', file=sys.stderr); exit(3)"], 60)
    with pytest.raises(MedusaKitError, match="more than 1 s"):
        processes.finished(["-c", "import time; time.sleep(60)"], 1)


def test_products_are_those_of_the_model() -> None:
    """Fused and not, they read the same weights."""
    sizes = {name: out * inner for name, (out, inner) in products_of(LLAMA_8B).items()}
    fused = sizes["qkv"] + sizes["o"] + sizes["gate_up"] + sizes["down"]
    as_is = sum(sizes[name] for name in ("q", "k", "v", "o", "gate", "up", "down"))
    assert as_is == fused
    assert LLAMA_8B.num_layers * fused + sizes["logits"] == LLAMA_8B.linear_weights


def test_the_setup_names_device_versions_and_date() -> None:
    found = describe(CPU)
    assert torch.__version__.startswith(str(found["torch"]))  # without +cu130, say
    assert {"date", "device", "cuda", "triton", "transformers", "medusa_kit"} <= set(found)
    assert set(found["sdpa"]["on"]) == {"flash", "efficient", "cudnn", "math"}
    assert "math" in found["sdpa"]["order"]


@pytest.mark.parametrize("module", [fingerprint, packed_linear], ids=lambda one: one.__name__)
def test_modules_load_without_what_is_not_needed(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NOT_NEEDED:
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("loaded_again", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loaded_again", again)  # dataclasses look for it
    spec.loader.exec_module(again)


# Random weights and the drafter that knows their text.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chained_weights_say_one_token_after_each(dtype: torch.dtype) -> None:
    base, next_V = random_base(TINY, CPU, dtype), successors(TINY.vocab_size, CPU)
    answer, _ = Oracle(base).generate([5, 6, 7], 40)
    assert answer[0] == next_V[7]
    assert [int(next_V[token]) for token in answer[:-1]] == answer[1:]
    assert len(set(answer)) == 40


def test_wide_weights_say_many_things() -> None:
    answer, _ = Oracle(random_base(EXACTNESS, CPU, torch.float32, wide=True)).generate([5, 6], 60)
    assert len(set(answer)) > 20


@pytest.mark.parametrize("wanted", [1.0, 2.6, 5.0])
def test_acceptance_is_what_was_asked_for(wanted: float) -> None:
    base, next_V = random_base(TINY, CPU, torch.float32), successors(TINY.vocab_size, CPU)
    engine = build_engine(base, attention="sdpa", fixed_shapes="always", keep_layers=True)
    engine.heads = KnownText.of(base, next_V, share_for(wanted))
    engine.use_tree(tree_of(16))
    result = engine.generate([5, 6, 7], max_new_tokens=TINY.vocab_size, drafter="medusa")
    assert result.stats.acceptance_length == pytest.approx(wanted, abs=0.3)
    assert "fixed shapes" in result.stats.steps_run_by


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_trees_have_the_size_asked_for(size: int) -> None:
    tree = tree_of(size)
    assert tree.num_nodes == size
    assert tree.depth == min(4, size - 1)


def test_weights_that_a_step_reads_are_counted_from_the_shape() -> None:
    model = random_base(TINY, CPU, torch.float32).model
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert TINY.linear_weights == sum(linear)
    assert [round(shape.linear_weights / 1e6) for shape in (SMOLLM2_135M, LLAMA_1B, LLAMA_8B)] == [
        134, 1236, 7505,
    ]  # fmt: skip


def test_no_figure_is_cut_off_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    told = report.Report(CPU, dry_run=False, path=None)
    every = [part for command in COMMANDS for part in parts(command, small=False)]
    longest = {part.kind: part for part in sorted(every, key=lambda p: len(p.name))}
    for kind, (_, columns) in TABLES.items():
        part = longest[kind]
        figures = {name: "triton" if digits is None else 987.6543 for _, name, digits in columns}
        told.add(report.Record(part.name, kind, part.shape, "done", True, figures, peak_gb=61.234))
    why = "attention 'triton' was asked for, but cannot be used here: no compiler was found"
    told.add(report.Record("without", "steps", "", "cannot", True, why=why))
    print_report(told)
    out = capsys.readouterr().out
    assert "…" not in out
    digits = [one for _, columns in TABLES.values() for _, _, one in columns]
    for count in (0, 1, 2, 3):
        assert out.count(f" {987.6543:.{count}f} ") == digits.count(count), count
    assert out.count(" 61.23 ") == len(TABLES)
    assert f"without: cannot, {why}\n" in out

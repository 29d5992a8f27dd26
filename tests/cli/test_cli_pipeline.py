"""From a recipe to a bench by the commands themselves, on one run folder."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.debug_model import MODEL, ROOT
from support.gguf.tiny_gguf import write_gguf
from support.kernels.rounded_engine import needs_integers
from support.tiny_models import tiny_base

from medusa_kit.base.gguf import debug_model
from medusa_kit.base.loading import load_base_model
from medusa_kit.engine.engine import Engine
from medusa_kit.heads import MedusaHeads, load_heads, save_heads
from medusa_kit.tree.plan import load_plan

Run = Callable[..., tuple[int, str, str]]


def test_training_leaves_heads_that_load(trained: Path) -> None:
    base = load_base_model("debug-tiny", device="cpu")
    heads = load_heads(trained, base)
    assert heads.num_heads == 3
    assert any(parameter.abs().max() > 0 for parameter in heads.parameters())
    assert (trained.parent / "metrics.jsonl").is_file()


def test_training_again_is_refused_and_fresh_starts_over(
    run: Run, trained: Path, tmp_path: Path
) -> None:
    recipe = ["train", ROOT / "recipes/debug.yaml", "train.epochs=1", "deepspeed.enabled=false",
              "base.device=cpu", f"output_dir={tmp_path}"]  # fmt: skip
    code, out, _ = run(*recipe)
    assert code == 0
    assert "held-out rows" in out
    assert "2 (token +4)" in out
    code, out, err = run(*recipe)
    assert (code, out) == (2, "")
    assert "finished" in err
    assert run(*recipe, "--fresh")[0] == 0


def test_a_dry_run_prints_the_recipe_and_the_work(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("train", ROOT / "recipes/debug.yaml", "--dry-run", "base.device=cpu",
                       f"output_dir={tmp_path / 'run'}", "train.learning_rate=0.25")  # fmt: skip
    assert code == 0
    assert "learning_rate: 0.25" in out
    assert "trained parameters" in out
    assert not (tmp_path / "run").exists()


def test_tree_search_leaves_a_tree(trained: Path) -> None:
    record = json.loads((trained / "tree.json").read_text())
    assert record["base_model"] == "debug-tiny"
    assert record["calibration_positions"] == 3 * 16
    listed = [(row["num_nodes"], row.get("dynamic", False)) for row in record["table"]]
    assert listed == [(1, False), (2, False), (4, False), (2, True), (4, True)]
    for name in ("statistics.npz", "tree.png", "calibration_answers.jsonl"):
        assert (trained / name).stat().st_size > 0


@pytest.mark.slow
def test_tree_search_from_statistics(run: Run, trained: Path, tmp_path: Path) -> None:
    common = ["tree-search", *MODEL, "--heads", trained, "--output", tmp_path, "--sizes", "1,3"]
    for source in (["--statistics", trained / "statistics.npz"], [],
                   ["--answers", trained / "calibration_answers.jsonl"]):  # fmt: skip
        code, out, err = run(*common, *source, "--nodes", "3", "--no-dynamic")
        assert code == 0
        assert "3 ←" in out
        assert "dynamic" not in out
        assert "2 nodes" not in out
        assert f"wrote {tmp_path / 'tree.json'}" in err
        tree = json.loads((tmp_path / "tree.json").read_text())
        assert [row["num_nodes"] for row in tree["table"]] == [1, 3]
    code, out, err = run(*common, "--statistics", tmp_path / "nowhere.npz")
    assert (code, out) == (2, "")
    assert "no statistics at" in err


@pytest.mark.slow
def test_a_tree_for_each_batch_size(run: Run, trained: Path, tmp_path: Path) -> None:
    """By the command, into tree.json, and on to the drafter of a batch."""
    ask = ["tree-search", *MODEL, "--heads", trained, "--output", tmp_path, "--sizes", "1,2,3",
           "--statistics", trained / "statistics.npz"]  # fmt: skip
    code, out, _ = run(*ask, "--batch-sizes", "1,2", "--nodes", "3")
    assert code == 0
    assert len(re.findall(r"3(?: dynamic)?, batch [12] ←", out)) == 2
    plan = load_plan(tmp_path / "tree.json")
    assert [(p.batch_size, p.tree.num_nodes) for p in plan.trees] == [(1, 3), (2, 3)]
    code, _, err = run("generate", "Hi", *MODEL, "--heads", trained, "--tree",
                       tmp_path / "tree.json", "-n", "4")  # fmt: skip
    assert (code, "4 tokens" in err) == (0, True)
    for sizes, message in (("0", "batch size 0 is out of range"), ("1,x", "batch sizes '1,x'")):
        code, _, err = run(*ask, "--batch-sizes", sizes)
        assert (code, message in err) == (2, True)


def test_choices_are_judged(run: Run, trained: Path, tmp_path: Path) -> None:
    choices = tmp_path / "choices.json"
    judge = ["tree-search", *MODEL, "--heads", trained, "--output", tmp_path, "--choices", choices]
    choices.write_text("[[0], [1], [0, 0]]")
    code, out, _ = run(*judge)
    assert code == 0
    assert "4 ←" in out
    choices.write_text("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]")
    (tmp_path / "tree.json").unlink()
    code, out, err = run(*judge)
    assert (code, out) == (2, "")
    assert "the tree has depth 4, expected at most 3" in err
    assert not (tmp_path / "tree.json").exists()
    code, _, err = run(*judge, "--batch-sizes", "1,4")
    assert (code, "--choices judges one tree" in err) == (2, True)
    code, _, err = run(*judge[:-1], tmp_path / "nowhere.json")
    assert (code, "no tree file at" in err) == (2, True)


def test_statistics_of_other_heads_are_refused(run: Run, trained: Path, tmp_path: Path) -> None:
    base = load_base_model("debug-tiny", device="cpu")
    save_heads(MedusaHeads.for_base(base, 2), tmp_path)
    code, out, err = run("tree-search", *MODEL, "--heads", tmp_path, "--statistics",
                         trained / "statistics.npz")  # fmt: skip
    assert (code, out) == (2, "")
    assert "the statistics are of 3 heads; these are 2" in err


def test_verify(run: Run, trained: Path, prompts: Path, tmp_path: Path) -> None:
    report = tmp_path / "deep" / "verify.json"
    asked = ["verify", *MODEL, "--heads", trained, "--prompts", prompts, "-n", "8", "--limit", "2"]
    code, out, _ = run(*asked, "--output", report)
    assert code == 0
    record = json.loads(report.read_text())
    assert list(record) == ["greedy", "sampled"]
    for part in record.values():
        assert (part["num_prompts"], part["identical"], part["bugs"]) == (2, 2, 0)
        assert part["num_tokens"] == 16
        assert part["attention"] == {"asked": "auto", "used": "sdpa", "fallbacks": []}
    assert "greedy" in out
    assert "sampled" in out
    code, out, _ = run(*asked, "--temperature", "0")
    assert code == 0
    assert "sampled" not in out


def test_verify_layer_by_layer(run: Run, prompts: Path, tmp_path: Path) -> None:
    for part in debug_model():
        part.save_pretrained(tmp_path / "base")
    code, out, _ = run("verify", "--model", tmp_path / "base", "--heads", "untrained", "--prompts",
                       prompts, "-n", "8", "--limit", "2", "--layer-by-layer", "--output",
                       tmp_path / "v.json")  # fmt: skip
    assert code == 0
    assert "held to transformers, layer by layer" in " ".join(out.split())
    record = json.loads((tmp_path / "v.json").read_text())
    for part in record.values():
        assert (part["num_prompts"], part["identical"], part["bugs"]) == (2, 2, 0)
        assert part["held_to"] == "plain transformers with checkpoint weights, layer by layer"
        assert part["reference"] == "transformers, layer by layer"
    code, _, err = run("verify", *MODEL, "--heads", "untrained", "--layer-by-layer")
    assert code != 0
    assert "cannot be verified layer by layer" in err


def test_verify_fails_on_a_bug(
    run: Run, trained: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Engine.generate

    def wrong(self: Engine, prompt: Any, **options: Any) -> Any:
        result = original(self, prompt, **options)
        result.token_ids[1] = (result.token_ids[1] + 1) % 256
        return result

    monkeypatch.setattr(Engine, "generate", wrong)
    code, out, err = run("verify", *MODEL, "--heads", trained, "--prompts", prompts, "-n", "4",
                         "--temperature", "0")  # fmt: skip
    assert code == 1
    assert "prompt 0, token 1: expected " in out
    assert out.count("BUG") == 3
    assert "error: a difference is more than rounding" in err


def test_bench(run: Run, trained: Path, prompts: Path, tmp_path: Path) -> None:
    code, out, err = run("bench", *MODEL, "--heads", f"ours={trained}", "--heads",
                         "fresh=untrained", "--prompts", prompts, "--limit", "2", "-n", "8",
                         "--attention", "flash", "--output", tmp_path / "bench")  # fmt: skip
    assert code == 0
    record = json.loads((tmp_path / "bench/bench.json").read_text())
    names = ["transformers generate", "transformers prompt lookup", "medusa-kit, plain decoding",
             "ours", "fresh"]  # fmt: skip
    assert [method["name"] for method in record["methods"]] == names
    assert [method["identical"] for method in record["methods"]] == [2] * 5
    assert record["base"]["name"] == "debug-tiny"
    assert record["attention"] == {"asked": "flash", "used": "flash", "fallbacks": []}
    assert "attention flash" in out
    assert (tmp_path / "bench/bench.png").read_bytes().startswith(b"\x89PNG")
    assert f"wrote {tmp_path / 'bench/bench.png'}" in err
    for name in names:
        assert name in out


def test_verify_and_bench_of_rounded_weights(
    run: Run, trained: Path, prompts: Path, tmp_path: Path
) -> None:
    """Held to the rounded model where exactness is asked for; nowhere called identical."""
    asked = [*MODEL, "--heads", trained, "--prompts", prompts, "-n", "8", "--limit", "2",
             "--weights", "int8"]  # fmt: skip
    code, out, err = run("verify", *asked, "--temperature", "0", "--output", tmp_path / "v.json")
    assert code == 0
    assert "against those of the same rounded model, not of the checkpoint" in err
    assert ("as the rounded" in out, "identical" in out) == (True, False)
    told = json.loads((tmp_path / "v.json").read_text())["greedy"]
    assert (told["bugs"], told["lossy"], told["base"]["weights"]) == (0, True, "int8")
    assert told["held_to"] == "plain transformers with int8 weights"

    code, out, _ = run("bench", "--peers", "transformers", *asked, "--output", tmp_path)
    assert code == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    assert (record["weights"], record["lossy"]) == ("int8", True)
    told = [(method["identical"], method["lossy"]) for method in record["methods"]]
    assert told == [(2, False), (None, True), (None, True)]
    assert "int8 weights: lossy" in out
    assert len(re.findall(r"│ lossy +│", out)) == 2
    assert "lossy: another model's answers" in " ".join(out.split())


@needs_integers
def test_verify_and_bench_of_rounded_activations(run: Run, prompts: Path, tmp_path: Path) -> None:
    """Identity within the precision; agreement with float32 on a line of its own."""
    model = write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    place = ["--model", model, "--device", "cpu", "--activations", "int8"]
    asked = [*place, "--heads", "untrained", "--prompts", prompts, "-n", "8", "--limit", "2"]
    code, out, err = run("generate", "Hi", *place, "-n", "4", "--json")
    assert (code, json.loads(out)["stats"]["activations"]) == (0, "int8")
    assert "; int8 activations" in err

    code, out, err = run("verify", *asked, "--output", tmp_path / "v.json")
    assert code == 0
    assert "held to plain decoding with int8 activations" in " ".join(out.split())
    assert out.count("agreement with float32: ") == 1
    assert "agreement with float32 is counted apart" in " ".join(err.split())
    told = json.loads((tmp_path / "v.json").read_text())
    assert [(part["identical"], part["bugs"], part["activations"]) for part in told.values()] == [
        (2, 0, "int8")] * 2  # fmt: skip
    assert told["greedy"]["agreement_with_float32"]["answers"] == 2
    assert told["sampled"]["agreement_with_float32"] is None

    code, out, _ = run("bench", "--peers", "transformers", *asked, "--output", tmp_path)
    assert code == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    assert (record["activations"], record["lossy"]) == ("int8", False)
    assert [method["identical"] for method in record["methods"]] == [2, 2, 2]
    assert record["agreement_with_float32"]["answers"] == 2
    assert out.count("agreement with float32: ") == 1
    assert ", int8 activations: 2 prompts" in " ".join(out.split())


def test_bench_of_a_prompt_set_in_batches(run: Run, trained: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "mt_bench.jsonl"
    rows = [{"question_id": i, "category": kind, "turns": [f"Count to {i}."]}
            for i, kind in enumerate(["math", "coding", "math"])]  # fmt: skip
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = run("bench", *MODEL, "--heads", trained, "--prompts", prompts, "-n", "8",
                       "--batch-size", "2", "--temperature", "0.9", "--seed", "5", "--peers",
                       "transformers,prompt-lookup", "--breakdown",
                       "--output", tmp_path)  # fmt: skip
    assert code == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    _, lookup, one, ours = record["methods"]
    assert [method.get("identical") for method in record["methods"]] == [None, None, 3, 3]
    assert (record["batch_size"], record["identical_to"]) == (2, "medusa-kit, plain decoding")
    assert record["sampling"] == {"temperature": 0.9, "seed": 5}
    assert lookup["not_run"] in " ".join(out.replace("│", " ").split()).replace(" – ", " ")
    assert {name: tally["answers"] for name, tally in ours["categories"].items()} == {
        "math": 2, "coding": 1}  # fmt: skip
    assert set(record["breakdown"]) == {one["name"], ours["name"]}
    setup = record["setup"]
    assert setup["steps_run_by"].startswith(("torch", "C++"))
    for shown in ("temperature 0.9, seed 5", "batch 2", setup["processor"], setup["transformers"],
                  "by category", "reading the weights once", "others draw other"):  # fmt: skip
        assert shown in " ".join(out.split())


def test_doctor(run: Run, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ROOT / "recipes/debug_conversations.jsonl"
    asked = ["doctor", "debug-tiny", "--device", "cpu", "--data", data, "--limit", "6"]
    code, out, err = run(*asked, "--heads", trained, "--tolerance", "1")
    assert code == 0, out
    for name in ("chat template", "head offset", "replay and decoding", "trained accuracy"):
        assert re.search(rf"{name} +│ ok ", out)
    assert re.search(r"the base's own words +│ warning ", out)
    assert "the base's own words: let the base write the answers itself" in err

    save_heads(MedusaHeads.for_base(tiny_base("llama"), 2), tmp_path)
    code, out, err = run(*asked, "--heads", tmp_path, "--json")
    assert code == 1
    assert "error: 1 problem found\n" in err
    of = {finding["name"]: finding for finding in json.loads(out)}
    assert of["heads and base"]["status"] == "problem"
    assert "'tiny-llama'" in of["heads and base"]["what"]
    assert of["head offset"]["status"] == "skipped"
    code, out, _ = run("doctor", *MODEL, "--heads", "auto")  # asked for, and there are none
    assert code == 1
    assert re.search(r"heads and base +│ problem ", out)
    code, out, _ = run("doctor", *MODEL)
    assert code == 0
    assert re.search(r"heads and base +│ skipped ", out)
    monkeypatch.setattr("medusa_kit.engine.load.shipped_heads", lambda fingerprint: trained)
    code, out, _ = run("doctor", *MODEL)
    assert re.search(r"heads and base +│ ok ", out)
    code, out, _ = run("doctor", *MODEL, "--heads", "none")
    assert re.search(r"heads and base +│ skipped ", out)
    code, out, err = run("doctor", "debug-tiny", "--data", tmp_path / "nowhere.jsonl")
    assert (code, out) == (1, "")
    assert "no data file" in err

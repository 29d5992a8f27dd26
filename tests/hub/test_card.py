"""The card says what was measured, and that the rest was not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from medusa_kit.base.model import BaseModel
from medusa_kit.heads import MedusaHeads, save_heads
from medusa_kit.heads.checkpoint import read_config, write_config
from medusa_kit.hub.card import CardOptions, render_card
from medusa_kit.hub.measured import read_measured
from medusa_kit.hub.redact_paths import redact_paths
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.train.run.provenance import origin_here, provenance
from medusa_kit.tree.candidate_tree import load_tree
from medusa_kit.tree.replay import replay
from medusa_kit.tree.statistics import RankStatistics

Run = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).parents[2]


def front(card: str) -> dict[str, object]:
    return yaml.safe_load(card.split("---")[1])


def test_everything_measured(run: Run, folder: Path) -> None:
    recipe = load_recipe(ROOT / "recipes/debug.yaml")
    (folder / "provenance.json").write_text(provenance(recipe, origin_here()))
    code, card, err = run("push", folder, "me/heads", "--dry-run", "--license", "mit",
                          "--data-license", "CC0", "--base-model", "tiny/debug")  # fmt: skip
    assert code == 0, err
    assert front(card) == {
        "library_name": "medusa-kit", "pipeline_tag": "text-generation", "license": "mit",
        "base_model": "tiny/debug", "base_model_relation": "adapter",
        "tags": ["medusa", "speculative-decoding", "medusa-kit"]}  # fmt: skip
    assert "**Not measured.**" not in card
    assert "/home" not in card
    assert (
        "| mt_bench.jsonl (4 prompts) | medusa-kit, greedy, batch 1 | 1.875 | 0.62 0.25 |" in card
    )
    assert "| medusa-kit | 225.0 | 2.25 × | 1.875 | 4 of 4 |" in card
    assert "Abacus 4, device cpu, float32, threads 3, batch 1, torch 9.9" in card
    assert "| greedy | verify_prompts.jsonl | medusa | 6 of 7 | 1,234 | 1 | 0 |" in card
    assert "| 5 | 1.750 | 2.5 | 1.40 × |" in card
    assert "on Abacus 3, device cpu, threads 2" in card
    assert "| licence of the data | CC0 |" in card
    assert "| training data | `debug_conversations.jsonl` |" in card
    assert "recipe.yaml" in err
    assert "heads.safetensors" in err


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_precision_of_figures_is_named(folder: Path) -> None:
    def card() -> str:
        return render_card(read_measured(folder), CardOptions("me/heads"))

    whole = card()
    assert "activations" not in whole
    agreement = {"answers": 4, "same": 3, "tokens": 2048, "same_tokens": 1999, "share": 0.976}
    rounded = {"activations": "int16", "agreement_with_float32": agreement}
    change(folder / "bench.json", **rounded)
    change(folder / "tree.json", activations="int8")
    verified = json.loads((folder / "verify.json").read_text())["greedy"]
    parts = {"greedy": verified | rounded,
             "sampled": verified | {"activations": "int16"}}  # fmt: skip
    (folder / "verify.json").write_text(json.dumps(parts))
    told = card()
    held = "With int16 activations answers are held to plain decoding in the same precision."
    assert told.count(held) == 2
    assert "held to plain transformers" not in told
    agrees = "3 of 4 answers are those of plain transformers; 1,999 of 2,048 tokens come before"
    for how in ("bench", "greedy"):
        assert f"Agreement with float32 ({how}): {agrees}" in told
    assert "Agreement with float32 (sampled): not measured." in told
    assert told.count("float32, int16 activations, threads 3") == 2
    assert "torch 9.9, int8 activations; another machine" in told


def test_replayed_figures_are_those_of_held_out_answers(folder: Path) -> None:
    statistics = RankStatistics.load(folder / "statistics.npz")
    _, held_out = statistics.split(0.25, seed=0)
    tree, _ = load_tree(folder / "tree.json")
    expected = replay(tree, held_out)
    card = render_card(read_measured(folder), CardOptions("me/heads"))
    shares = " ".join(f"{share:.2f}" for share in expected.acceptance_by_depth)
    assert f"questions.jsonl (2 answers held out, {expected.tokens} tokens)" in card
    assert f"| {expected.acceptance_length:.3f} | {shares} |" in card
    # All that reach depth 1 do so through one of its two nodes.
    values = read_measured(folder).replayed.values_N  # type: ignore[union-attr]
    assert values is not None
    assert values[1] + values[2] == pytest.approx(expected.acceptance_by_depth[0])
    assert values[4] == pytest.approx(expected.acceptance_by_depth[2])
    assert f"└── 0 {values[4]:.1%}" in card
    first = (statistics.ranks_PK[:, 0] == 0).sum() / (statistics.ranks_PK[:, 0] >= 0).sum()
    assert f"| head 1 (token +2) | {first:.1%} |" in card


def test_nothing_measured(run: Run, chat_base: BaseModel, tmp_path: Path) -> None:
    save_heads(MedusaHeads.for_base(chat_base, 2), tmp_path)
    code, card, err = run("push", tmp_path, "me/heads", "--dry-run")
    assert code == 0
    assert card.count("**Not measured.**") == 4
    for command in ("tree-search", "bench", "verify"):
        assert f"`medusa-kit {command} --heads" in card
        assert command in err
    assert front(card)["license"] == "unknown"
    assert "base_model" not in front(card)
    assert "--base-model" in err
    assert "Licence of the data: not recorded" in card
    assert "×" not in card.replace("`", "")


def test_local_paths_become_names() -> None:
    seen = {
        "/a/b": ["medusa-kit, /home/me/x/heads", "~/c/d.json", "C:\\u\\me", "me/heads", 3, None]
    }
    assert redact_paths(seen) == {"b": ["medusa-kit, heads", "d.json", "me", "me/heads", 3, None]}
    for kept in ("https://hf.co/a/b", "1 / 2", "and/or", "tokens a second"):
        assert redact_paths(kept) == kept


def test_a_bug_is_said(folder: Path) -> None:
    record = json.loads((folder / "verify.json").read_text())
    record["greedy"]["differences"][0]["margin"] = 1.0
    (folder / "verify.json").write_text(json.dumps(record))
    card = render_card(read_measured(folder), CardOptions("me/heads"))
    assert "not exact here" in card


def test_a_verify_report_from_before_the_tolerance_was_renamed_is_read(folder: Path) -> None:
    record = json.loads((folder / "verify.json").read_text())
    for one in (record["greedy"], *record["greedy"]["differences"]):
        one["noise"] = one.pop("rounding_tolerance")
    (folder / "verify.json").write_text(json.dumps(record))
    card = render_card(read_measured(folder), CardOptions("me/heads"))
    assert "the tolerance measured at load (1.5e-06)" in card


@pytest.mark.parametrize(
    ("kinds", "vllm", "tgi"),
    [
        ({}, True, True),
        ({"projection": "own"}, True, True),
        ({"projection": "reduced", "reduced_ids": torch.arange(16)}, True, False),
        ({"kind": "hydra"}, False, False),
        ({"kind": "recurrent", "mlp_size": 40}, False, False),
    ],
    ids=["shared", "own", "reduced", "hydra", "recurrent"],
)
def test_other_engines(
    chat_base: BaseModel, tmp_path: Path, kinds: dict[str, Any], vllm: bool, tgi: bool
) -> None:
    save_heads(MedusaHeads.for_base(chat_base, 2, **kinds), tmp_path)
    card = render_card(read_measured(tmp_path), CardOptions("me/heads", base_model="a/b"))
    assert ("vllm serve a/b --speculative-config" in card) == vllm
    assert ("text-generation-launcher" in card) == tgi
    assert ("Not possible" in card) == (not vllm)
    assert ("| heads | 2, of 1 shared block(s) of 40 |" in card) == ("mlp_size" in kinds)
    if vllm:
        assert '"num_speculative_tokens": 2}' in card
    else:
        assert "medusa-kit train --quick --for vllm -m a/b " in card
    assert ("--model-loader-extra-config" in card) == ("reduced_ids" in kinds)
    engines = next(line for line in card.splitlines() if "engines that load them" in line)
    assert ("vLLM" in engines, "TGI" in engines) == (vllm, tgi)
    assert "medusa-kit" in engines


def test_heads_of_some_tokens_with_a_matrix_each_are_for_no_other_engine(
    chat_base: BaseModel, tmp_path: Path
) -> None:
    """Those of vLLM's own format, which 0.32 cannot load."""
    heads = MedusaHeads.for_base(chat_base, 2, projection="reduced", reduced_ids=torch.arange(16))
    save_heads(heads, tmp_path)
    write_config(tmp_path, replace(read_config(tmp_path), projection="own"))
    card = rendered(tmp_path)
    assert "a matrix of its own for 16 tokens" in card
    assert "vllm serve" not in card


def rendered(folder: Path, **options: Any) -> str:
    return render_card(read_measured(folder), CardOptions("me/heads", **options))


def test_the_epochs_are_those_that_ran(folder: Path) -> None:
    """Training may end before the recipe's epochs do, and the kept heads be from before its end."""
    recipe = load_recipe(ROOT / "recipes/debug.yaml", ["train.epochs=5"])
    path = folder / "provenance.json"
    path.write_text(provenance(recipe, origin_here()))
    assert "| epochs | not recorded; 5 at most |" in rendered(folder)
    path.write_text(
        provenance(recipe, origin_here(), {"updates": 12, "epochs": 0.24, "of_updates": 12})
    )
    assert "| epochs | 0.24 (12 updates; 5 at most by the recipe) |" in rendered(folder)
    path.write_text(provenance(recipe, origin_here()))
    run = {"recipe": recipe.model_dump(), "processes": 1, "num_updates": 3, "num_positions": 960}
    (folder.parent / "run.json").write_text(json.dumps(run))
    assert "| epochs | 0.5 (3 updates" in rendered(folder)


@pytest.mark.parametrize("name", ["medusa-kit, plain decoding", "medusa-kit, one node"])
def test_plain_decoding_is_not_listed_as_drafting(run: Run, folder: Path, name: str) -> None:
    """By its names in reports written earlier, which say no more of it."""
    bench = json.loads((folder / "bench.json").read_text())
    for method in bench["methods"]:
        del method["kind"], method["drafter"]
    bench["methods"].append(bench["methods"][1] | {"name": name})
    (folder / "bench.json").write_text(json.dumps(bench))
    code, card, _ = run("push", folder, "me/heads", "--dry-run", "--license", "mit",
                        "--data-license", "CC0", "--base-model", "tiny/debug")  # fmt: skip
    assert code == 0
    assert f"| {name} | 225.0" in card
    assert f"| {name}, greedy" not in card
    assert "| medusa-kit, greedy" in card
    assert "| transformers generate, greedy" not in card


@pytest.mark.parametrize("beside", ["recipe", "bench", "run", "folder", "nothing"])
def test_a_folder_that_was_the_base_is_never_linked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    """Its name looks like a Hub id, and push runs where there is no such folder."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "base_model_name": "models/tiny"}))
    bench = json.loads((folder / "bench.json").read_text())
    source = "folder" if beside == "bench" else "hub"
    bench["base"]["source"] = source
    (folder / "bench.json").write_text(json.dumps(bench))
    verify = json.loads((folder / "verify.json").read_text())
    verify["greedy"]["base"]["source"] = "hub"
    (folder / "verify.json").write_text(json.dumps(verify))
    if beside == "recipe":
        recipe = load_recipe(ROOT / "recipes/debug.yaml", ["base.model=/mnt/models/tiny"])
        (folder / "provenance.json").write_text(provenance(recipe, origin_here()))
    if beside == "run":
        (folder.parent / "run.json").write_text(json.dumps({"base": {"source": "folder"}}))
    if beside == "folder":
        (folder.parent / "models/tiny").mkdir(parents=True)
    monkeypatch.chdir("/")
    card = rendered(folder)
    assert ("huggingface.co/models/tiny" in card) == (beside == "nothing")
    assert ("base_model" in front(card)) == (beside == "nothing")


def test_heads_keep_the_whole_path_of_a_folder(
    chat_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models/tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for source, kept in (("folder", str(tmp_path / "models/tiny")), ("hub", "models/tiny")):
        info = replace(chat_base.info, name="models/tiny", source=source)
        monkeypatch.setattr(chat_base, "info", info)
        assert MedusaHeads.for_base(chat_base, 1).config.base_model_name == kept


@pytest.mark.parametrize("licence", ["apache2", "MIT", "Apache-2.0 or so"])
def test_a_licence_that_the_hub_does_not_know_is_refused(
    run: Run, folder: Path, licence: str
) -> None:
    code, _, err = run("push", folder, "me/heads", "--dry-run", "--license", licence)
    assert code == 2
    assert f"--license {licence!r} is none of the Hub's names" in err
    assert "hint: did you mean" in err or "`other`" in err


@pytest.mark.parametrize(("rows", "said"), [
    ([(5, 1.4)], "Chosen among these for its predicted speed-up"),
    ([(5, 1.38), (9, 1.4)], "Chosen among these for its predicted speed-up"),
    ([(1, 1.0), (5, 0.57)], "None of these was predicted to be faster"),
    ([(5, 0.57), (9, 1.4)], "Another of these has more predicted speed-up"),
    ([(9, 1.4)], "The tree above is none of these"),
], ids=lambda value: str(value)[:20])  # fmt: skip
def test_what_is_said_of_the_tree_agrees_with_its_table(
    folder: Path, rows: list[tuple[int, float]], said: str
) -> None:
    record = json.loads((folder / "tree.json").read_text())
    record["table"] = [{"num_nodes": nodes, "acceptance_length": 1.5, "step_ms": 2.0,
                        "predicted_speed_up": speed} for nodes, speed in rows]  # fmt: skip
    (folder / "tree.json").write_text(json.dumps(record))
    card = rendered(folder)
    assert said in card
    assert card.count("Chosen among these") == said.startswith("Chosen")


def test_a_card_with_a_bug_does_not_promise_the_same_words(folder: Path) -> None:
    assert "the answer has the base model's own words" in rendered(folder)
    record = json.loads((folder / "verify.json").read_text())
    record["greedy"]["differences"][0]["margin"] = 1.0
    (folder / "verify.json").write_text(json.dumps(record))
    assert "the answer has the base model's own words" not in rendered(folder)


def test_heads_that_are_no_numbers_are_not_pushed(run: Run, folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    tensors = load_file(copied / "heads.safetensors")
    name = next(iter(tensors))
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, copied / "heads.safetensors")
    code, _, err = run("push", str(copied), "me/heads", "--dry-run")
    assert code == 1
    assert f"{name} holds NaN or infinite numbers" in err

"""What `convert` prints to serve the heads, and what the manual shows."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from support.same_heads import FP32, base_in, our_heads, saved

from medusa_kit.base.loading import load_base_model
from medusa_kit.heads import MedusaHeads, save_heads
from medusa_kit.heads.convert import convert
from medusa_kit.tree.candidate_tree import CandidateTree


def test_what_serves_it_is_told(tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "ours")
    _, written = convert(source, tmp_path / "my heads", "vllm", base_name="org/base")
    assert shlex.join(written.command or []) == (
        "vllm serve org/base --speculative-config "
        f"""'{{"method":"medusa","model":"{tmp_path}/my heads","num_speculative_tokens":3}}'"""
    )
    _, written = convert(source, tmp_path / "trt", "trt-llm", base_name="org/base")
    assert {"--num_medusa_heads", "--medusa_model_dir"} < set(written.command or [])


def test_heads_for_some_tokens_are_served_without_the_check_of_weights(tmp_path: Path) -> None:
    """vLLM 0.32 reports token_map as a weight that was not loaded."""
    source, _ = saved(tmp_path / "ours", projection="reduced")
    _, written = convert(source, tmp_path / "out", "vllm", base=base_in(FP32))
    at = (written.command or []).index("--model-loader-extra-config")
    assert json.loads((written.command or [])[at + 1]) == {"enable_weights_track": False}
    assert any("even if heads are missing" in note for note in written.notes)
    source, _ = saved(tmp_path / "whole", projection="shared")
    _, written = convert(source, tmp_path / "other", "vllm", base=base_in(FP32))
    assert "--model-loader-extra-config" not in (written.command or [])
    assert not any("missing" in note for note in written.notes)


@pytest.mark.parametrize("to", ["tgi", "lorax", "fd-v1"])
def test_a_config_names_a_base_that_its_engine_can_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, to: str
) -> None:
    """The folder of a base that only we know by name, or a note on what to give."""
    heads = our_heads(projection="own")
    heads.config = replace(heads.config, base_model_name="models/tiny.Q4_K_M.gguf")
    save_heads(heads, tmp_path / "ours")
    _, written = convert(tmp_path / "ours", tmp_path / "nameless", to)
    assert any("'models/tiny.Q4_K_M.gguf', which" in note and "--base-name" in note
               for note in written.notes)  # fmt: skip
    base = base_in(FP32)
    monkeypatch.setattr(base, "info", replace(base.info, name=str(tmp_path), source="folder"))
    (tmp_path / "config.json").write_text("{}")
    for name, expected in ((None, str(tmp_path)), ("org/base", "org/base")):
        _, written = convert(
            tmp_path / "ours", tmp_path / f"out-{name is None}", to, base=base, base_name=name
        )
        assert written.config["base_model_name_or_path"] == expected
        assert not any("--base-name" in note for note in written.notes)


def test_the_kit_loads_the_bases_that_it_names(tmp_path: Path) -> None:
    base = load_base_model("debug-tiny", device="cpu")
    save_heads(MedusaHeads.for_base(base, num_heads=2).requires_grad_(False), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "vllm", "vllm", base=base)
    for to, noted in (("tgi", True), ("medusa-kit", False)):
        _, written = convert(tmp_path / "vllm", tmp_path / to, to, base=base)
        assert any("'debug-tiny', which" in note for note in written.notes) == noted


@pytest.mark.parametrize("to", ["vllm", "trt-llm"])
def test_what_serves_it_names_the_folder_of_the_base(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, to: str
) -> None:
    """The heads have another name for their base; --model says where it is."""
    heads = our_heads(projection="shared")
    heads.config = replace(heads.config, base_model_name="smollm2-135m-instruct")
    save_heads(heads, tmp_path / "ours")
    base = base_in(FP32)
    monkeypatch.setattr(base, "info", replace(base.info, name=str(tmp_path), source="folder"))
    (tmp_path / "config.json").write_text("{}")
    _, written = convert(tmp_path / "ours", tmp_path / "out", to, base=base)
    assert str(tmp_path) in (written.command or [])
    assert "smollm2-135m-instruct" not in (written.command or [])


def test_a_name_that_only_we_know_is_not_put_into_a_command(tmp_path: Path) -> None:
    heads = our_heads(projection="own")
    heads.config = replace(heads.config, base_model_name="smollm2-135m-instruct")
    save_heads(heads, tmp_path / "ours")
    _, written = convert(tmp_path / "ours", tmp_path / "out", "vllm")
    assert (written.command or [])[:3] == ["vllm", "serve", "BASE"]


def test_the_chain_that_the_manual_shows_fits_the_heads_it_names() -> None:
    """docs/vllm.md: as deep as the drafts of its command, so that three heads take it."""
    page = (Path(__file__).parents[2] / "docs/vllm.md").read_text()
    chain = json.loads(re.findall(r"echo '(\[.*\])' > chain\.json", page)[0])
    drafts = int(re.findall(r'"num_speculative_tokens": (\d+)', page)[0])
    tree = CandidateTree.from_choices(chain)
    assert (tree.depth, tree.num_nodes) == (drafts, drafts + 1) == (3, 4)

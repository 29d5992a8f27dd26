"""Folders of other engines, as they document them: recognised, read exactly, or refused by name.

Shapes: D hidden, V vocabulary, K heads, L blocks, B batch.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.foreign_folders import (
    FOLDERS,
    D,
    Parts,
    V,
    agree,
    base_tensors,
    dotted,
    fd_config,
    fd_pickle,
    merged_shards,
    numbers,
    put,
    random_parts,
    trt_engine,
    vllm,
    vllm_config,
)
from support.same_heads import (
    DTYPES,
    SIZES,
    base_in,
    base_matrix,
    hidden,
    hold,
    hold_matrices,
    logits_of,
)
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model
from medusa_kit.errors import CheckpointError, IncompatibleBaseError
from medusa_kit.heads import load_heads
from medusa_kit.heads.formats.files import hub_patterns, local_heads_folder


@pytest.mark.parametrize("case", FOLDERS)
def test_every_format_gives_its_own_logits(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, build = FOLDERS[case]
    for dtype in DTYPES:
        for K, L in SIZES:
            parts = random_parts(K, L, dtype, tied=case == "fd-v1 pickle")
            folder = build(tmp_path / f"{K}-{L}-{dtype}", parts)
            heads = load_heads(folder, base_in(dtype))
            assert (heads.num_heads, heads.config.num_blocks) == (K, L)
            assert heads.config.projection == "own"
            hold(heads, parts, dtype)
            assert not any(one.requires_grad for one in heads.parameters())
            captured = capsys.readouterr()
            assert captured.err.startswith(f"heads in format {name} ({K} head")
            assert captured.err.count("\n") == 1
            assert "could not be verified" in captured.err
            assert captured.out == ""


@pytest.mark.parametrize("L", [1, 2])
def test_version_2_ends_in_the_matrix_of_the_base(tmp_path: Path, L: int) -> None:
    parts = random_parts(3, L)
    parts.matrices = [base_matrix()] * 3
    config = fd_config(parts, version="2")
    put(tmp_path, config, medusa_lm_head=dotted(parts, matrices=False))
    heads = load_heads(tmp_path, base_in(torch.float32))
    assert heads.config.projection == "shared"
    hold(heads, parts)


def test_heads_without_blocks_are_bare_matrices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = random_parts(2)
    bare = Parts([[], []], [[], []], parts.matrices)
    put(tmp_path, fd_config(bare), medusa_lm_head=dotted(bare))
    heads = load_heads(tmp_path, base_in(torch.float32))
    hold_matrices(heads, bare.matrices)
    agree(logits_of(heads), bare.logits(hidden()))
    assert "no residual block" in capsys.readouterr().err


def test_of_a_merged_model_only_what_holds_heads_is_read(tmp_path: Path) -> None:
    parts = random_parts()
    merged_shards(tmp_path, parts)
    (tmp_path / "pytorch_model-00001-of-00002.bin").unlink()
    heads = load_heads(tmp_path, base_in(torch.float32))
    hold(heads, parts)


# What vLLM's config turns on and off.


def test_vllm_without_biases_has_biases_of_zero(tmp_path: Path) -> None:
    parts = random_parts()
    put(tmp_path, vllm_config(parts, medusa_fc_bias=False), model=vllm(parts, bias=False))
    parts.biases = [[torch.zeros(D)] for _ in range(3)]
    heads = load_heads(tmp_path, base_in(torch.float32))
    hold(heads, parts)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
@pytest.mark.parametrize("of_base", [True, False])
def test_vllm_with_one_matrix_for_all(tmp_path: Path, name: str, of_base: bool) -> None:
    parts = random_parts()
    one = base_matrix() if of_base else parts.matrices[0]
    parts.matrices = [one] * 3
    tensors = {key: value for key, value in vllm(parts).items() if "lm_heads" not in key}
    config = vllm_config(parts, original_lm_head=True)
    put(tmp_path, config, model=tensors | {name: one})
    heads = load_heads(tmp_path, base_in(torch.float32))
    assert heads.config.projection == ("shared" if of_base else "own")
    hold(heads, parts)


@pytest.mark.parametrize("rows", ["cut", "full"])
@pytest.mark.parametrize("of_base", [True, False])
def test_vllm_with_a_truncated_vocabulary(tmp_path: Path, rows: str, of_base: bool) -> None:
    """Tokens outside the map are impossible; the map need not be sorted."""
    parts = random_parts()
    if of_base:
        parts.matrices = [base_matrix()] * 3
    expected_KBV = parts.logits(hidden())
    token_map = torch.tensor([60, 2, 95, 17, 0])
    outside = [i for i in range(V) if i not in token_map]
    expected_KBV[..., outside] = -torch.inf
    full = list(parts.matrices)
    if rows == "cut":
        parts.matrices = [matrix[token_map] for matrix in parts.matrices]
    put(tmp_path, vllm_config(parts, truncated_vocab_size=5),
        model=vllm(parts) | {"token_map": token_map})  # fmt: skip
    heads = load_heads(tmp_path, base_in(torch.float32))
    assert heads.config.projection == ("reduced" if of_base else "own")
    hold_matrices(heads, full)
    agree(logits_of(heads), expected_KBV)
    best = heads.candidates(hidden(), 2)
    assert torch.equal(best, expected_KBV.topk(2).indices)
    assert torch.equal(heads.to_columns(torch.tensor([95, 3])), torch.tensor([4, -1]))


# The tensors decide; where the config differs, a warning gives both numbers.

Build = Callable[[Path, Parts], Any]

DIFFERENCES: dict[str, tuple[Build, list[str]]] = {
    "two heads of five": (
        lambda f, p: put(f, {**fd_config(p), "medusa_num_heads": 2}, medusa_lm_head=dotted(p)),
        ["medusa_num_heads is 2", "5 is used"]),
    "layers": (
        lambda f, p: put(f, {**fd_config(p), "medusa_num_layers": 3}, medusa_lm_head=dotted(p)),
        ["medusa_num_layers is 3", "1 is used"]),
    "version": (
        lambda f, p: put(f, fd_config(p, version="2"), medusa_lm_head=dotted(p)),
        ["version is '2'", "1 is used"]),
    "architectures that crash TGI": (
        lambda f, p: put(f, fd_config(p, architectures=["X"]), medusa_lm_head=dotted(p)),
        ["`architectures`", "TGI crashes"]),
    "nested": (
        lambda f, p: put(f, {"medusa": {"medusa_num_heads": 2}}, model=dotted(p, "medusa_heads.")),
        ["medusa_num_heads is 2", "5 is used"]),
    "sizes": (
        lambda f, p: put(f, vllm_config(p, vocab_size=32001), model=vllm(p)),
        ["vocab_size is 32001", "96 is used"]),
    "a key of the base in vLLM's config": (
        lambda f, p: put(f, vllm_config(p, num_attention_heads=32), model=vllm(p)),
        ["num_attention_heads is 32", "5 is used"]),
    "biases that vLLM leaves out": (
        lambda f, p: put(f, vllm_config(p, medusa_fc_bias=False), model=vllm(p)),
        ["biases are used", "medusa_fc_bias"]),
    "a map that is not used": (
        lambda f, p: put(f, vllm_config(p), model=vllm(p) | {"token_map": torch.arange(4)}),
        ["token_map of 4 tokens is not used"]),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENCES)
def test_differences_are_reported(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = random_parts(5)
    build, messages = DIFFERENCES[case]
    build(tmp_path, parts)
    heads = load_heads(tmp_path, base_in(torch.float32))
    assert heads.num_heads == 5
    hold(heads, parts)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning:" in line]
    assert len(warnings) == 1
    assert all(message in warnings[0] for message in messages)


# Folders that are refused.


@dataclass
class Evil:
    marker: str

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def evil_pickle(folder: Path, parts: Parts) -> None:
    fd_pickle(folder, parts)
    torch.save({"0.0.linear.weight": Evil(str(folder / "ran"))}, folder / "medusa_lm_head.pt")


def nested_pickle(folder: Path, parts: Parts) -> None:
    fd_pickle(folder, parts)
    torch.save({"state_dict": dotted(parts)}, folder / "medusa_lm_head.pt")


def cut(build: Build, file: str, size: int = 3000) -> Build:
    def run(folder: Path, parts: Parts) -> None:
        build(folder, parts)
        os.truncate(folder / file, size)

    return run


def lacking_shard(folder: Path, parts: Parts) -> None:
    merged_shards(folder, parts)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()


def fd(change: Callable[[dict[str, torch.Tensor]], Any]) -> Build:
    """The plain file with its tensors changed."""

    def run(folder: Path, parts: Parts) -> None:
        tensors = dotted(parts)
        change(tensors)
        put(folder, fd_config(parts), medusa_lm_head=tensors)

    return run


def as_vllm(change: Callable[[dict[str, torch.Tensor]], Any], **config: Any) -> Build:
    def run(folder: Path, parts: Parts) -> None:
        tensors = vllm(parts)
        change(tensors)
        put(folder, vllm_config(parts, **config), model=tensors)

    return run


def two_ranks(folder: Path, parts: Parts) -> None:
    put(folder, {"num_medusa_heads": 3}, rank0=trt_engine(parts), rank1=trt_engine(parts))


NOTHING: dict[str, torch.Tensor] = {}
SCALE = "medusa_heads.1.0.linear.weight_scale"
REFUSED: dict[str, tuple[Build, str]] = {
    "a pickle that runs code": (evil_pickle, "more than plain tensors.*save_file"),
    "a pickle of something else": (nested_pickle, "not a state dict"),
    "a cut pickle": (cut(fd_pickle, "medusa_lm_head.pt"), "cannot be read"),
    "a cut file": (cut(fd(len), "medusa_lm_head.safetensors"), "cannot be read"),
    "a missing shard": (lacking_shard, r"00002-of-00002\.bin is missing"),
    "broken JSON": (
        lambda f, p: (fd(len)(f, p), (f / "config.json").write_text("{")), "is not JSON"),
    "a missing bias": (fd(lambda t: t.pop("1.0.linear.bias")), "block 0 of head 1 has no bias"),
    "a missing weight": (fd(lambda t: t.pop("2.0.linear.weight")), "block 0 of head 2 has no wei"),
    "a missing matrix": (fd(lambda t: t.pop("1.1.weight")), "head 1 has no vocabulary matrix"),
    "a head of a wrong number": (
        fd(lambda t: t.update({"20000.0.linear.weight": torch.zeros(D, D)})), "count 20001 heads"),
    "a missing head": (
        fd(lambda t: [t.pop(n) for n in list(t) if n.startswith("1.")]), "head 1 has no weight"),
    "an unknown tensor": (fd(lambda t: t.update(extra=torch.ones(1))), "extra is unexpected"),
    "a bias of a matrix": (fd(lambda t: t.update({"0.1.bias": torch.ones(V)})), r"0\.1\.bias is"),
    "a matrix out of place": (
        fd(lambda t: t.update({"0.3.weight": t.pop("0.1.weight")})), r"0\.3\.weight is unexpected"),
    "a misshapen weight": (
        fd(lambda t: t.update({"1.0.linear.weight": torch.ones(D, D - 1)})),
        r"1\.0\.linear\.weight has shape \(32, 31\), expected \(32, 32\)"),
    "a Hydra head": (
        fd(lambda t: t.update({"1.0.linear.weight": torch.ones(D, 2 * D)})), "Hydra"),
    "matrices of two sizes": (
        fd(lambda t: t.update({"2.1.weight": torch.ones(V + 1, D)})), r"\(97, 32\), expected \(96"),
    "no float": (
        fd(lambda t: t.update({"0.0.linear.weight": torch.ones(D, D, dtype=torch.int8)})), "int8"),
    "FP8 scales": (
        lambda f, p: put(f, {}, model=dotted(p, "medusa_heads.") | {SCALE: torch.ones(1)}),
        f"{SCALE} is a scale of quantised weights"),
    "FP8 weights": (
        fd(lambda t: t.update({"0.0.linear.weight": torch.ones(D, D).to(torch.float8_e4m3fn)})),
        "float8_e4m3fn"),
    "an adapter that was not merged": (
        lambda f, p: put(f, {}, model={"base_model.model.medusa_head.0.modules_to_save.default."
                                       "0.linear.weight": torch.ones(D, D)}),
        "not been merged"),
    "two formats": (lambda f, p: put(f, {}, a=dotted(p), b=vllm(p)), "several formats"),
    "tensors split over ranks": (two_ranks, r"both in rank0\.safetensors and in rank1"),
    "a model without heads": (lambda f, p: put(f, {}, model=base_tensors()), "no Medusa heads"),
    "an unknown tensor for vLLM": (as_vllm(lambda t: t.update(x=torch.ones(1))), "x is unexpected"),
    "promised biases": (
        as_vllm(lambda t: [t.pop(n) for n in list(t) if n.endswith("bias")]), "holds no bias"),
    "some biases": (as_vllm(lambda t: t.pop("blocks.2.layers.0.bias")), "head 2 has no bias"),
    "one and many matrices": (
        as_vllm(lambda t: t.update({"lm_head.weight": torch.ones(V, D)})), "holds both"),
    "one matrix that is not promised": (
        as_vllm(lambda t: [t.pop(f"lm_heads.{i}.weight") for i in (1, 2)]),
        "head 1 has no vocabulary matrix"),
    "no token map": (as_vllm(len, truncated_vocab_size=5), "holds no token_map"),
    "a map of other size": (
        as_vllm(lambda t: t.update(token_map=torch.arange(V + 4)), truncated_vocab_size=5),
        "matrices have 96 rows"),
    "a map with a repetition": (
        as_vllm(lambda t: t.update(token_map=torch.tensor([1, 1])), truncated_vocab_size=2),
        "different token ids"),
    "a size in words": (as_vllm(len, vocab_size="96"), "vocab_size is '96'"),
    "no weights": (lambda f, p: put(f, fd_config(p)), "does not describe medusa-kit heads"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(tmp_path: Path, case: str) -> None:
    build, message = REFUSED[case]
    build(tmp_path, random_parts())
    with pytest.raises(CheckpointError) as caught:
        load_heads(tmp_path, base_in(torch.float32))
    assert re.search(message, str(caught.value), re.DOTALL)
    assert not (tmp_path / "ran").exists()


def test_sizes_of_another_base_are_refused(tmp_path: Path) -> None:
    put(tmp_path, fd_config(random_parts()), medusa_lm_head=dotted(random_parts()))
    wide = wrap_model(tiny_model("llama", hidden_size=64))
    with pytest.raises(IncompatibleBaseError, match="hidden size 32 ≠ 64") as caught:
        load_heads(tmp_path, wide, force=True)
    assert "lmsys/vicuna" in str(caught.value)
    large = wrap_model(tiny_model("llama", vocab_size=100))
    with pytest.raises(IncompatibleBaseError, match="vocabulary size 96 ≠ 100"):
        load_heads(tmp_path, large)


def test_an_adapter_beside_the_heads_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = random_parts()
    lora = {"base_model.model.layers.0.q_proj.lora_A.weight": torch.ones(2, D)}
    put(tmp_path, fd_config(parts), medusa_lm_head=dotted(parts) | lora)
    with pytest.raises(CheckpointError, match=r"lora_A\.weight is unexpected"):
        load_heads(tmp_path, base_in(torch.float32))
    (tmp_path / "adapter_config.json").write_text(json.dumps(numbers(parts)))
    heads = load_heads(tmp_path, base_in(torch.float32))
    hold(heads, parts)
    assert "LoRA adapter that this base lacks" in capsys.readouterr().err


def test_of_a_hub_model_only_the_shards_with_heads_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, here = random_parts(), tmp_path / "here"
    merged_shards(tmp_path / "hub", parts)
    here.mkdir()

    def fetch(repository: str, revision: str, allow_patterns: list[str]) -> str:
        assert (repository, revision) == ("org/merged", "v2")
        for pattern in allow_patterns:
            for path in (tmp_path / "hub").glob(pattern):
                shutil.copy(path, here)
        return str(here)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    heads = load_heads(local_heads_folder("org/merged@v2"), base_in(torch.float32))
    hold(heads, parts)
    names = {path.name for path in here.glob("*.bin")}
    assert names == {"pytorch_model-00002-of-00002.bin"}
    assert hub_patterns(FOLDERS["fd-v1 beside its base"][1](tmp_path / "beside", parts)) == [
        "medusa_lm_head.safetensors", "medusa_lm_head.pt", "heads.safetensors"]  # fmt: skip
    alone = FOLDERS["tgi"][1](tmp_path / "alone", parts)
    assert hub_patterns(alone) == ["*.safetensors", "medusa_lm_head.pt"]

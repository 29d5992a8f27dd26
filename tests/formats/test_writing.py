"""What is written, compared with what each engine's loader needs; what is refused, and why.

Shapes: D hidden, V vocabulary, K heads, L blocks, B batch.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine_loaders import LOADERS, REPEATS_A_BLOCK
from support.foreign_folders import (
    FOLDERS,
    D,
    V,
    agree,
    dotted,
    fd_config,
    merged_shards,
    put,
    random_parts,
    vllm,
    vllm_config,
)
from support.same_heads import (
    DTYPES,
    FP32,
    SIZES,
    SOME,
    base_in,
    base_matrix,
    hidden,
    hold,
    logits_of,
    our_heads,
    same_weights,
    saved,
)
from support.tiny_models import tiny_base

from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError, MedusaKitError
from medusa_kit.heads import MedusaHeads, load_heads, read_config, save_heads
from medusa_kit.heads.convert import WRITERS, convert


@pytest.mark.parametrize("to", [*LOADERS, "medusa-kit"])
@pytest.mark.parametrize("projection", ["own", "shared"])
def test_engines_get_the_same_heads(tmp_path: Path, to: str, projection: str) -> None:
    """Out, through the engine's own loader, and back into ours with every bit."""
    if (to, projection) == ("fd-v2", "own"):
        return  # refused, below
    for dtype in DTYPES:
        base = base_in(dtype)
        for K, L in SIZES:
            if L > 1 and to in REPEATS_A_BLOCK:
                continue  # refused, below
            place = tmp_path / f"{K}-{L}-{dtype}"
            source, heads = saved(place / "ours", K=K, L=L, projection=projection, dtype=dtype)
            convert(source, place / "out", to, base=base, base_name="some/base")
            expected_KBV = logits_of(heads, dtype)
            if to in LOADERS:
                loaded_KBV = LOADERS[to](place / "out", hidden(dtype), base_matrix(dtype))
                agree(loaded_KBV, expected_KBV)
            back = load_heads(place / "out", base)
            same_weights(back, heads)
            agree(logits_of(back, dtype), expected_KBV)
            assert back.config.projection == projection
            stored = {tensor.dtype for path in (place / "out").glob("*.safetensors")
                      for tensor in load_file(path).values()}  # fmt: skip
            assert stored == {dtype}


@pytest.mark.parametrize("case", FOLDERS)
def test_any_format_becomes_any_other(tmp_path: Path, case: str) -> None:
    parts = random_parts(3, 2)
    source = FOLDERS[case][1](tmp_path / "source", parts)
    for to in LOADERS:
        if to in REPEATS_A_BLOCK:
            continue
        convert(source, tmp_path / to, to, base_name="some/base")
        loaded_KBV = LOADERS[to](tmp_path / to, hidden(), base_matrix())
        agree(loaded_KBV, parts.logits(hidden()))
        hold(load_heads(tmp_path / to, base_in(FP32)), parts)


def test_the_dtype_of_the_heads_stays_whatever_the_base_is_read_in(tmp_path: Path) -> None:
    """A matrix of the base is narrowed only where that changes no number."""
    parts = random_parts(dtype=torch.bfloat16)
    put(tmp_path / "v2", fd_config(parts), medusa_lm_head=dotted(parts, matrices=False))
    convert(tmp_path / "v2", tmp_path / "a", "fd-v1", base=base_in(FP32))
    dtypes = {name: t.dtype for name, t in load_file(tmp_path / "a" / FILE).items()}
    assert dtypes["0.0.linear.weight"] == torch.bfloat16
    assert dtypes["0.1.weight"] == FP32
    base = tiny_base("llama")
    base.model.to(torch.bfloat16).to(FP32)
    convert(tmp_path / "v2", tmp_path / "b", "fd-v1", base=base)
    assert {t.dtype for t in load_file(tmp_path / "b" / FILE).values()} == {torch.bfloat16}
    convert(tmp_path / "v2", tmp_path / "c", "medusa-kit", base=base_in(FP32))
    stored = load_file(tmp_path / "c" / "heads.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert read_config(tmp_path / "c").base_fingerprint == base_in(FP32).info.fingerprint


FILE = "medusa_lm_head.safetensors"


# Two versions of the same heads.


def test_version_2_becomes_version_1_and_back(tmp_path: Path) -> None:
    base = base_in(FP32)
    source, heads = saved(tmp_path / "ours", projection="shared")
    for to in ("tgi", "lorax"):
        convert(source, tmp_path / f"{to}-v2", to)
        assert len(load_file(tmp_path / f"{to}-v2" / FILE)) == 6
        convert(tmp_path / f"{to}-v2", tmp_path / f"{to}-v1", to, base=base, layout="v1")
        tensors = load_file(tmp_path / f"{to}-v1" / FILE)
        assert all(torch.equal(tensors[f"{i}.1.weight"], base_matrix()) for i in range(3))
        convert(tmp_path / f"{to}-v1", tmp_path / f"{to}-again", to, base=base, layout="v2")
        assert len(load_file(tmp_path / f"{to}-again" / FILE)) == 6
        for version in ("v2", "v1", "again"):
            logits = LOADERS[to](tmp_path / f"{to}-{version}", hidden(), base_matrix())
            agree(logits, logits_of(heads))
            same_weights(load_heads(tmp_path / f"{to}-{version}", base), heads)


def test_one_matrix_of_the_base_is_written_once_for_vllm(tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "ours", projection="shared")
    convert(source, tmp_path / "out", "vllm", base=base_in(FP32))
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert [name for name in tensors if "lm_head" in name] == ["lm_head.weight"]
    assert torch.equal(tensors["lm_head.weight"], base_matrix())


@pytest.mark.parametrize("of_base", [True, False])
def test_heads_for_some_tokens_reach_vllm_and_come_back(tmp_path: Path, of_base: bool) -> None:
    source, heads = saved(tmp_path / "ours", projection="reduced")
    expected_KBV = logits_of(heads)
    if not of_base:
        parts = random_parts()
        parts.matrices = [parts.matrices[0]] * 3  # one each could not be loaded
        expected_KBV = parts.logits(hidden())
        expected_KBV[..., [i for i in range(V) if i not in SOME]] = -torch.inf
        tensors = vllm(parts) | {"token_map": SOME}
        foreign = put(tmp_path / "vllm", vllm_config(parts, truncated_vocab_size=5), model=tensors)
        convert(foreign, tmp_path / "again", "medusa-kit", base=base_in(FP32))
        source = tmp_path / "again"
        assert read_config(source).projection == "own"
    convert(source, tmp_path / "out", "vllm", base=base_in(FP32))
    logits_KBV = LOADERS["vllm"](tmp_path / "out", hidden(), base_matrix())
    agree(logits_KBV, expected_KBV)
    back = load_heads(tmp_path / "out", base_in(FP32))
    same_weights(back, load_heads(source, base_in(FP32)))
    agree(logits_of(back), expected_KBV)


# What vLLM gets: biases only where there are any, no key of the base, and files of known sizes.


def test_vllm_gets_no_biases_where_all_are_zero(tmp_path: Path) -> None:
    heads = our_heads(dtype=torch.float16, K=5)
    for blocks in heads.blocks:
        for block in blocks:  # type: ignore[attr-defined]
            block.linear.bias.zero_()
    save_heads(heads, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "out", "vllm")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": D, "num_heads": 5,
        "num_hidden_layers": 1, "vocab_size": V, "truncated_vocab_size": None,
        "medusa_fc_bias": False, "original_lm_head": False,
    }  # fmt: skip
    logits = LOADERS["vllm"](tmp_path / "out", hidden(torch.float16), base_matrix(torch.float16))
    agree(logits, logits_of(heads, torch.float16))
    same_weights(load_heads(tmp_path / "out", base_in(torch.float16)), heads)
    names = set(load_file(tmp_path / "out/model.safetensors"))
    assert names == set(vllm(random_parts(5), bias=False))
    data = (tmp_path / "out/model.safetensors").read_bytes()
    header = int.from_bytes(data[:8], "little")
    assert len(data) == 8 + header + 5 * (D * D + V * D) * 2


def test_the_size_of_the_published_vllm_heads() -> None:
    """vllm-medusa-vicuna-7b-v1.3: 1,478,493,144 bytes follow from these names, in bfloat16."""
    names = vllm(random_parts(5), bias=False)
    header, end = {}, 0
    for name in sorted(names):
        shape = [4096, 4096] if name.startswith("blocks") else [32000, 4096]
        start, end = end, end + shape[0] * shape[1] * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = len(json.dumps(header, separators=(",", ":")))
    assert end == 1_478_492_160
    assert 8 + (text + 7) // 8 * 8 + end == 1_478_493_144


# Configs.


@pytest.mark.parametrize("to", ["fd-v1", "tgi", "lorax", "trt-llm"])
def test_configs_hold_these_keys_and_no_others(tmp_path: Path, to: str) -> None:
    source, _ = saved(tmp_path / "ours")
    convert(source, tmp_path / "out", to)
    config = json.loads((tmp_path / "out/config.json").read_text())
    version = {"version": 1.0} if to == "lorax" else {}
    name = {"base_model_name_or_path": "tiny-llama"}
    assert config == {**name, "medusa_num_heads": 3, "medusa_num_layers": 1, **version}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", FILE}


def test_heads_of_a_merged_model_name_that_model(tmp_path: Path) -> None:
    source = merged_shards(tmp_path / "tuned", random_parts())
    convert(source, tmp_path / "out", "tgi")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["base_model_name_or_path"] == str(source)


def test_lorax_keeps_the_adapter(tmp_path: Path) -> None:
    parts = random_parts()
    lora = {"base_model.model.layers.0.q_proj.lora_A.weight": torch.randn(2, D)}
    source = put(tmp_path / "in", fd_config(parts), heads=dotted(parts), adapter_model=lora)
    (source / "adapter_config.json").write_text('{"r": 2}')
    convert(source, tmp_path / "out", "lorax")
    assert (tmp_path / "out/adapter_config.json").read_text() == '{"r": 2}'
    kept = load_file(tmp_path / "out/adapter_model.safetensors")
    assert torch.equal(kept[next(iter(lora))], lora[next(iter(lora))])
    logits = LOADERS["lorax"](tmp_path / "out", hidden(), base_matrix())
    agree(logits, parts.logits(hidden()))
    _, written = convert(source, tmp_path / "tgi", "tgi")
    assert any("LoRA adapter" in note for note in written.notes)
    assert not (tmp_path / "tgi/adapter_config.json").exists()


# What cannot be converted exactly is refused, with the reason.

Call = Callable[[Path], Any]
OURS: dict[str, dict[str, Any]] = {
    "hydra": {"projection": "shared", "kind": "hydra"},
    "recurrent": {"projection": "shared", "kind": "recurrent"},
}


def ours_to(to: str, base: bool = False, layout: str = "auto", **options: Any) -> Call:
    def call(folder: Path) -> None:
        source, _ = saved(folder / "ours", **options)
        convert(source, folder / "out", to, base=base_in(FP32) if base else None, layout=layout)

    return call


def nameless(to: str) -> Call:
    parts = random_parts()
    return lambda f: convert(
        put(f / "in", {"base_model_name_or_path": "N/A"}, heads=dotted(parts)), f / "out", to
    )


def version_2(to: str) -> Call:
    parts = random_parts()
    return lambda f: convert(
        put(f / "in", fd_config(parts), heads=dotted(parts, matrices=False)), f / "out", to
    )


def own_rows_for_some_to_vllm(f: Path) -> Any:
    parts = random_parts()
    parts.matrices = [matrix[SOME] for matrix in parts.matrices]
    config = vllm_config(parts, vocab_size=V, truncated_vocab_size=5)
    foreign = put(f / "in", config, model=vllm(parts) | {"token_map": SOME})
    return convert(foreign, f / "out", "vllm")


IMPOSSIBLE: dict[str, tuple[Call, type[MedusaKitError], str]] = {
    **{f"{kind} to {to}": (
        ours_to(to, base=True, **options), ConfigError,
        f"read tokens besides.*that {name} loads: medusa-kit train --quick --for {engine} -m "
        ".*heads.kind=medusa")
       for kind, options in OURS.items()
       for to, name, engine in (("vllm", "vLLM", "vllm"), ("tgi", "TGI", "tgi"),
                                ("fd-v2", "FasterDecoding", "tgi"))},
    **{f"{kind} to medusa-kit": (ours_to("medusa-kit", base=True, **options), ConfigError,
                                 f"medusa-kit heads already, of kind {kind}")
       for kind, options in OURS.items()},
    "own to fd-v2": (ours_to("fd-v2", base=True), CheckpointError, "different from the base's"),
    "own to fd-v2, no base": (ours_to("fd-v2"), CheckpointError, "no base was named to compare"),
    "own to tgi v2": (ours_to("tgi", layout="v2"), CheckpointError, "no vocabulary matrices"),
    "two blocks to tgi v2": (
        ours_to("tgi", layout="v2", L=2, projection="shared"), CheckpointError, "one block a head"),
    "two blocks to tgi, no base": (
        ours_to("tgi", L=2, projection="shared"), ConfigError, "--model"),
    "shared to vllm, no base": (ours_to("vllm", projection="shared"), ConfigError, "--model"),
    "own rows for some tokens to vllm": (own_rows_for_some_to_vllm, CheckpointError,
                                         "matrix of its own for 5 tokens.*projection reduced"),
    "reduced to vllm, no base": (ours_to("vllm", projection="reduced"), ConfigError, "--model"),
    **{f"reduced to {to}": (ours_to(to, base=True, projection="reduced"), CheckpointError,
                            "score 5 tokens of the vocabulary.*--to vllm.*--quick --for tgi -m "
                            ".*heads.projection=shared")
       for to in LOADERS if to != "vllm"},
    "medusa-kit, no base": (ours_to("medusa-kit"), ConfigError, "--model"),
    "version 2 to mlc, no base": (version_2("mlc"), ConfigError, "--model"),
    "no name of the base": (nameless("tgi"), ConfigError, "--base-name"),
    "unknown format": (ours_to("vlm"), ConfigError, "'vlm' cannot be written.*did you mean vllm"),
    "into shards": (ours_to("fd-merged"), ConfigError, "written separately: --to fd-v1"),
    "unknown layout": (ours_to("tgi", layout="v3"), ConfigError, "layout 'v3'"),
    "a layout of vllm": (ours_to("vllm", layout="v1"), ConfigError, "layout 'v1' of format vllm"),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    call, kind, message = IMPOSSIBLE[case]
    with pytest.raises(kind) as caught:
        call(tmp_path)
    flat = str(caught.value).replace("\n", " ")
    assert re.search(message, flat), flat
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_heads_of_another_base_are_not_expanded_with_its_matrix(tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "ours", projection="shared")
    with pytest.raises(IncompatibleBaseError, match="fingerprint"):
        convert(source, tmp_path / "out", "tgi", base=tiny_base("llama", seed=1), layout="v1")


def test_a_scale_or_cap_of_the_base_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A positive scale keeps the order of guesses, a negative one reverses it."""
    parts = random_parts()
    source = put(tmp_path / "in", fd_config(parts), heads=dotted(parts))
    for number, family in enumerate(["cohere-scaled", "granite-scaled", "gemma3-capped"]):
        base = tiny_base(family)
        _, written = convert(source, tmp_path / str(number), "vllm", base=base)
        assert any("scales or caps its logits" in note for note in written.notes)
        ours = load_heads(source, base)
        assert "scales or caps" in capsys.readouterr().err
        expected_KBC = parts.logits(hidden()).topk(5).indices
        assert torch.equal(ours.candidates(hidden(), 5), expected_KBC)
    base.scale_logits = replace(base.scale_logits, factor=-1.0)
    with pytest.raises(CheckpointError, match="changes the order"):
        convert(source, tmp_path / "out", "vllm", base=base)


def test_a_base_whose_output_embedding_has_a_bias(tmp_path: Path) -> None:
    """Foreign matrices have no bias: ours get zeros, and the base's rows cannot be written."""
    base = tiny_base("phi")
    base.output_embedding.bias.data.normal_()
    parts = random_parts()
    source = put(tmp_path / "in", fd_config(parts), heads=dotted(parts))
    heads = load_heads(source, base)
    hold(heads, parts)
    convert(source, tmp_path / "ours", "medusa-kit", base=base)
    convert(tmp_path / "ours", tmp_path / "vllm", "vllm", base=base)
    logits = LOADERS["vllm"](tmp_path / "vllm", hidden(), base.output_embedding.weight)
    agree(logits, parts.logits(hidden()))
    shared = put(tmp_path / "v2", fd_config(parts), heads=dotted(parts, matrices=False))
    with pytest.raises(CheckpointError, match="has a bias"):
        convert(shared, tmp_path / "out", "fd-v1", base=base)
    trained = MedusaHeads.for_base(base, 2, projection="own")
    save_heads(trained, tmp_path / "trained")
    with pytest.raises(CheckpointError, match=r"projections\.0\.bias is not zero"):
        convert(tmp_path / "trained", tmp_path / "out", "vllm", base=base)


# The folder that is written.


def test_what_lies_there_is_not_overwritten(tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "ours")
    convert(source, tmp_path / "out", "mlc")
    with pytest.raises(ConfigError, match="is not empty"):
        convert(source, tmp_path / "out", "tgi")
    convert(source, tmp_path / "out", "tgi", force=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", FILE}
    (tmp_path / "out/tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json, which does not belong"):
        convert(source, tmp_path / "out", "tgi", force=True)
    for inside in (source, source / "deeper", tmp_path):
        with pytest.raises(ConfigError, match="would overwrite"):
            convert(source, inside, "tgi", force=True)


@pytest.mark.parametrize("there", ["model", "merged", "config alone", "damaged"])
def test_a_model_is_not_replaced_by_force(tmp_path: Path, there: str) -> None:
    """It may have the same names of files as heads have."""
    source, _ = saved(tmp_path / "ours")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    weights = {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(8, 4)}
    if there == "merged":
        convert(source, tmp_path / "mlc", "mlc")
        heads = load_file(tmp_path / "mlc/model.safetensors")
        weights |= {name: tensor for name, tensor in heads.items()}
    if there == "damaged":
        (folder / FILE).write_bytes(b"half")
    elif there != "config alone":
        save_file(weights, folder / "model.safetensors")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="holds no heads of its own"):
        convert(source, folder, "tgi", force=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_heads_are_not_saved_over_a_models_config(tmp_path: Path) -> None:
    base, _ = saved(tmp_path / "ours")
    heads = MedusaHeads.for_base(tiny_base("llama"), 1)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="not that of medusa-kit heads"):
        save_heads(heads, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "ours"]
    save_heads(heads, base)  # over heads


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_a_file(tensors: Any, path: Path, **options: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    source, _ = saved(tmp_path / "ours")
    monkeypatch.setattr("medusa_kit.heads.convert.save_file", half_a_file)
    with pytest.raises(OSError, match="No space"):
        convert(source, tmp_path / "out", "tgi")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_every_writer_has_a_loader_to_be_held_against() -> None:
    assert set(WRITERS) == {*LOADERS, "medusa-kit"}

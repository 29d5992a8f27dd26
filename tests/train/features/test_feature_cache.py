"""Hidden states on disk: the same training, nothing stored twice, nothing lost."""

import json
import os
import shutil
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.killed import after_each_rename

from medusa_kit import console
from medusa_kit.base.fingerprint import Fingerprint
from medusa_kit.errors import IncompatibleBaseError, MedusaKitError
from medusa_kit.heads import load_heads
from medusa_kit.train.data import prepare
from medusa_kit.train.features import cache as feature_cache
from medusa_kit.train.features import shards as feature_shards
from medusa_kit.train.features.cache import cache_folder, cached_positions, row_digest
from medusa_kit.train.features.features import FeatureOptions, collect_features
from medusa_kit.train.features.shards import check_shards
from medusa_kit.train.processes import distributed
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.trainer import train_heads


@pytest.fixture
def recipe_with_cache(make_recipe, tmp_path):
    def build(name="run", dtype="float32", cache="cache", **train):
        options = {"features": "disk", "cache_dir": str(tmp_path / cache), "cache_dtype": dtype}
        return make_recipe(output_dir=str(tmp_path / name), train={**options, **train})

    return build


def shards(recipe):
    return sorted(cache_folder(recipe).glob("shard-*.safetensors"))


def losses(recipe):
    lines = (RunFolder(recipe).path / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.parametrize("loss", [{}, {"loss": "soft", "soft_share": 0.5, "soft_top": 4}])
def test_training_from_disk_is_training_from_memory(
    tiny_base, counting_rows, make_recipe, recipe_with_cache, tmp_path, loss
):
    base, rows = tiny_base(), counting_rows()
    options = {"log_every": 1, **loss}
    memory = make_recipe(output_dir=str(tmp_path / "memory"), train=options)
    disk = recipe_with_cache(**options)
    weights = []
    for recipe in (memory, disk):
        report = train_heads(base, rows, recipe)
        weights.append(load_heads(report.heads_folder, base).state_dict())
    assert losses(disk) == pytest.approx(losses(memory), rel=1e-5)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-3, atol=1e-5)


def test_live_and_cached_training_see_the_same_loss(
    tiny_base, counting_rows, make_recipe, recipe_with_cache, tmp_path
):
    """With one update an epoch both train on the same positions; in bfloat16 nearly the same."""
    base, rows = tiny_base(), counting_rows()
    options = {"micro_batch_positions": 1000, "log_every": 1, "epochs": 4}
    live = make_recipe(output_dir=str(tmp_path / "live"), train={"features": "live", **options})
    exact = recipe_with_cache("exact", cache="exact_cache", **options)
    rounded = recipe_with_cache("rounded", dtype="bfloat16", **options)
    for recipe in (live, exact, rounded):
        train_heads(base, rows, recipe)
    assert len(losses(live)) == 4
    assert losses(exact) == pytest.approx(losses(live), rel=1e-5)
    assert losses(rounded) == pytest.approx(losses(live), rel=2e-2)
    assert losses(rounded) != losses(exact)


def test_only_the_positions_trained_on_are_stored_and_equal_rows_once(
    tiny_base, counting_rows, recipe_with_cache
):
    base, recipe = tiny_base(), recipe_with_cache(dtype="bfloat16")
    items = prepare([*counting_rows(4), *counting_rows(4)], 4)
    found = cached_positions(base, items, recipe, FeatureOptions(100))
    with safe_open(shards(recipe)[0], framework="pt") as stream:
        hidden_PD = stream.get_tensor("hidden_PD")
    assert hidden_PD.shape == (4 * 20, 16)
    assert hidden_PD.dtype == torch.bfloat16
    assert len(found.ahead_PJ) == 8 * 20
    rows_P = torch.tensor([159, 0, 80, 3])
    hidden_PD, ahead_PJ, _ = found.rows(rows_P)
    assert torch.equal(hidden_PD[1], hidden_PD[2])
    expected = torch.cat([base.hidden_states(torch.tensor([i.input_ids]))[0, i.positions_P]
                          for i in items])[rows_P]  # fmt: skip
    torch.testing.assert_close(hidden_PD, expected.bfloat16().float(), rtol=1e-2, atol=1e-2)
    assert torch.equal(ahead_PJ, torch.cat([torch.from_numpy(i.ahead_PJ) for i in items])[rows_P])
    index = json.loads((cache_folder(recipe) / "index.json").read_text())
    assert index["base_fingerprint"] == base.info.fingerprint
    assert [shard["file"] for shard in index["shards"]] == [path.name for path in shards(recipe)]


def test_a_cache_is_added_to_and_goes_on_after_an_interruption(
    tiny_base, counting_rows, recipe_with_cache, monkeypatch, capsys
):
    base, recipe = tiny_base(), recipe_with_cache()
    items, options = prepare(counting_rows(6), 4), FeatureOptions(30)
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 1)  # a shard a row
    original, done = feature_cache.run, []

    def stop_after_two(*arguments):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return original(*arguments)

    monkeypatch.setattr(feature_cache, "run", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        cached_positions(base, items, recipe, options)
    kept = shards(recipe)
    assert len(kept) == 2
    monkeypatch.setattr(feature_cache, "run", lambda *a: done.append(1) or original(*a))
    capsys.readouterr()
    found = cached_positions(base, items, recipe, options)
    assert len(done) == 6
    assert "80 of 120 training tokens are missing" in capsys.readouterr().err
    assert set(kept) < set(shards(recipe))
    store = collect_features(base, items, options)
    every = found.rows(torch.arange(120))[0]
    torch.testing.assert_close(
        every.sort(0).values, store.hidden_PD.sort(0).values, rtol=1e-4, atol=1e-5
    )
    cached_positions(base, items, recipe, options)
    assert len(done) == 6  # nothing is missing any more


def test_what_a_killed_run_has_written_is_not_computed_again(
    tiny_base, counting_rows, recipe_with_cache, monkeypatch, capsys
):
    """Killed before each of its renames: of the index, of each shard, of the index again."""
    base, recipe = tiny_base(), recipe_with_cache()
    items, options = prepare(counting_rows(4), 4), FeatureOptions(30)
    monkeypatch.setattr(feature_cache, "SHARD_SECONDS", 0.0)  # a shard a row
    original, computed = feature_cache.run, []
    monkeypatch.setattr(
        feature_cache, "run", lambda base, group, *more: computed.append(len(group))
        or original(base, group, *more),
    )  # fmt: skip
    expected = collect_features(base, items, options).hidden_PD.sort(0).values
    there = []
    for _ in after_each_rename(
        lambda: cached_positions(base, items, recipe, options),
        lambda: shutil.rmtree(cache_folder(recipe), ignore_errors=True),
    ):
        there.append(len(shards(recipe)))
        computed.clear()
        capsys.readouterr()
        found = cached_positions(base, items, recipe, options)
        assert sum(computed) == 4 - there[-1]
        said = f"{20 * sum(computed)} of 80 training tokens are missing"
        assert said in capsys.readouterr().err
        every = found.rows(torch.arange(80))[0].sort(0).values
        torch.testing.assert_close(every, expected, rtol=1e-4, atol=1e-5)
    assert there == [0, 0, 1, 2, 3, 4]


def test_rows_that_are_added_later_are_the_only_ones_computed(
    tiny_base, counting_rows, recipe_with_cache, monkeypatch
):
    """Also where prompts are trained on, and where rows held out are others than before."""
    base, rows = tiny_base(), counting_rows(20)
    original, computed = feature_cache.run, []
    monkeypatch.setattr(
        feature_cache, "run", lambda base, group, *more: computed.extend(
            tuple(item.input_ids) for item in group) or original(base, group, *more),
    )  # fmt: skip
    for name, count in (("first", 9), ("second", 20)):
        recipe = recipe_with_cache(name)
        data = recipe.data.model_copy(update={"train_on": "all"})
        train_heads(base, rows[:count], recipe.model_copy(update={"data": data}))
    assert len(computed) == len(set(computed))


def test_what_a_killed_process_left_of_a_shard_is_removed_later(
    tiny_base, counting_rows, recipe_with_cache
):
    base, recipe = tiny_base(), recipe_with_cache()
    items, options = prepare(counting_rows(2), 4), FeatureOptions(30)
    folder = cache_folder(recipe)
    folder.mkdir()
    left, written_now = (folder / f".shard-0.safetensors.{n * 8}.tmp" for n in "ab")
    for path in (left, written_now):
        path.write_bytes(b"part")
    os.utime(left, (0, 0))
    cached_positions(base, items, recipe, options)
    assert [left.exists(), written_now.exists()] == [False, True]


def test_a_shard_that_is_cut_off_is_named_and_made_again(
    tiny_base, counting_rows, recipe_with_cache, monkeypatch, capsys
):
    base, recipe = tiny_base(), recipe_with_cache()
    items, options = prepare(counting_rows(3), 4), FeatureOptions(30)
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 1)
    expected = cached_positions(base, items, recipe, options).rows(torch.arange(60))[0].clone()
    broken = shards(recipe)[1]
    broken.write_bytes(broken.read_bytes()[:-50])
    found = cached_positions(base, items, recipe, options)
    said = capsys.readouterr().err
    assert broken.name in said
    assert "computed again" in said
    assert len(shards(recipe)) == 3
    torch.testing.assert_close(found.rows(torch.arange(60))[0], expected, rtol=1e-4, atol=1e-5)


def flip_a_bit(path, place):
    contents = bytearray(path.read_bytes())
    contents[place] ^= 4
    path.write_bytes(contents)


@pytest.mark.parametrize("what", ["a hidden state", "a chance", "the number of a row's positions"])
def test_a_shard_with_a_flipped_bit_is_named_and_made_again(
    tiny_base, counting_rows, recipe_with_cache, monkeypatch, capsys, what
):
    base, recipe = tiny_base(), recipe_with_cache()
    items, options = prepare(counting_rows(3), 4), FeatureOptions(30, soft_top=4)
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 1)
    rows_P = torch.arange(60)
    hidden, ahead, soft = cached_positions(base, items, recipe, options).rows(rows_P)
    expected = [part.clone() for part in (hidden, ahead, *soft)]
    broken = shards(recipe)[1]
    contents = broken.read_bytes()
    with safe_open(broken, "pt") as stream:
        tensors = {name: stream.get_tensor(name) for name in ("hidden_PD", "chances_PS")}
    part = {"a hidden state": tensors["hidden_PD"][7], "a chance": tensors["chances_PS"][7]}.get(
        what
    )
    place = contents.index(b", 20]") + 3 if part is None else contents.index(part.numpy().tobytes())
    flip_a_bit(broken, place)
    capsys.readouterr()
    found = cached_positions(base, items, recipe, options)
    said = capsys.readouterr().err
    assert broken.name in said
    assert "computed again" in said
    assert "20 of 60 training tokens are missing" in said
    hidden, ahead, soft = found.rows(rows_P)
    for ours, theirs in zip((hidden, ahead, *soft), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_processes_share_the_checks_miss_no_damaged_shard_and_report_all(
    tiny_base, counting_rows, recipe_with_cache, monkeypatch, capsys
):
    """The second one begins when the first has done its share."""
    base, recipe = tiny_base(), recipe_with_cache()
    items = prepare(counting_rows(4), 4)
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 1)
    cached_positions(base, items, recipe, FeatureOptions(30))
    damaged = shards(recipe)
    for path in damaged:
        flip_a_bit(path, -5)
    here, done, meeting, parts = threading.local(), threading.Event(), threading.Barrier(2), {}

    def gathered(part):
        parts[here.rank] = part
        done.set()
        meeting.wait(60)
        return [parts[0], parts[1]]

    def check(rank):
        here.rank = rank
        try:
            assert rank == 0 or done.wait(60)
            check_shards(cache_folder(recipe), [row_digest(item) for item in items], lambda _: "")
        finally:
            done.set()

    monkeypatch.setattr(distributed, "world", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: here.rank)
    monkeypatch.setattr(distributed, "gathered", gathered, raising=False)
    monkeypatch.setattr(console, "is_main", lambda: here.rank == 0)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, (0, 1)))
    assert len(damaged) == 4
    assert shards(recipe) == []
    said = capsys.readouterr().err
    assert all(path.name in said for path in damaged)


def test_a_shard_without_a_checksum_is_used(
    tiny_base, counting_rows, recipe_with_cache, monkeypatch, capsys
):
    """As older versions wrote it."""
    base, recipe = tiny_base(), recipe_with_cache()
    items, options = prepare(counting_rows(3), 4), FeatureOptions(100)
    expected = cached_positions(base, items, recipe, options).rows(torch.arange(60))[0] + 1
    (shard,) = shards(recipe)
    with safe_open(shard, "pt") as stream:
        header = stream.metadata()
    assert header.keys() > {"rows"}
    save_file({"hidden_PD": expected}, shard, {"rows": header["rows"]})
    monkeypatch.setattr(feature_cache, "run", None)
    found = cached_positions(base, items, recipe, options)
    assert torch.equal(found.rows(torch.arange(60))[0], expected)
    said = " ".join(capsys.readouterr().err.split())
    assert "damaged" not in said
    assert said.count("do not say of which base model they are") == 1


def test_checksums_are_compared_once_a_run_and_where_a_row_is_used(
    tiny_base, counting_rows, recipe_with_cache, monkeypatch
):
    base, recipe, compared = tiny_base(), recipe_with_cache(), []
    items, options = prepare(counting_rows(3), 4), FeatureOptions(30)
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 1)
    cached_positions(base, items, recipe, options)
    checksum = feature_shards._checksum
    monkeypatch.setattr(
        feature_shards, "_checksum", lambda *of: compared.append(1) or checksum(*of)
    )
    cached_positions(base, items[:2], recipe, options)
    assert len(compared) == 2


def test_a_cache_of_whole_rows_is_made_again(tiny_base, counting_rows, recipe_with_cache, capsys):
    """Versions up to 0.1 kept all tokens for heads with a prefix layer."""
    base, recipe, items = tiny_base(), recipe_with_cache(), prepare(counting_rows(3), 4)
    cached_positions(base, items, recipe, FeatureOptions(100))
    index = feature_cache.cache_folder(recipe) / "index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "whole_rows": True}))
    capsys.readouterr()
    cached_positions(base, items, recipe, FeatureOptions(100))
    said = capsys.readouterr().err
    assert "was made for prefix-layer heads" in said
    assert "60 of 60 training tokens are missing" in said


def test_a_cache_of_another_base_or_format_is_refused(tiny_base, counting_rows, recipe_with_cache):
    base, items = tiny_base(), prepare(counting_rows(3), 4)
    cached_positions(base, items, recipe_with_cache(), FeatureOptions(100))
    other = tiny_base()
    other.model.lm_head.weight.data += 1
    changed = type(base)(other.model, None, "other", "memory")
    with pytest.raises(IncompatibleBaseError, match="base_fingerprint"):
        cached_positions(changed, items, recipe_with_cache(), FeatureOptions(100))
    with pytest.raises(IncompatibleBaseError, match="dtype 'bfloat16' ≠ 'float32'"):
        cached_positions(base, items, recipe_with_cache(dtype="bfloat16"), FeatureOptions(100))

    class Tokenizer:
        def get_vocab(self):
            return {"a": 0}

    base.tokenizer = Tokenizer()
    with pytest.raises(IncompatibleBaseError, match="tokenizer") as caught:
        cached_positions(base, items, recipe_with_cache(), FeatureOptions(100))
    assert "cache_dir" in caught.value.hint


def test_hidden_states_of_a_base_with_another_mlp_are_not_used(
    tiny_base, counting_rows, recipe_with_cache
):
    """Embedding, output embedding and final norm are the same; the hidden states are not."""
    base, items = tiny_base(), prepare(counting_rows(3), 4)
    cached_positions(base, items, recipe_with_cache(), FeatureOptions(100))
    other = tiny_base().model
    other.model.layers[0].mlp.down_proj.weight.data *= 1.5
    changed = type(base)(other, None, "tuned", "memory")
    with pytest.raises(IncompatibleBaseError, match="base_fingerprint"):
        cached_positions(changed, items, recipe_with_cache(), FeatureOptions(100))


@pytest.mark.parametrize("rows", [3, 6], ids=["all rows copied", "some rows copied"])
@pytest.mark.parametrize("place", ["a cache of its own", "an empty folder"])
def test_files_of_hidden_states_of_another_base_are_refused(
    tiny_base, counting_rows, recipe_with_cache, rows, place
):
    """Copied from its cache, or left without the index that says of which base they are."""
    base, items = tiny_base(), prepare(counting_rows(rows), 4)
    other = tiny_base().model
    other.model.layers[0].mlp.down_proj.weight.data *= 1.5
    changed, there, here = (
        type(base)(other, None, "tuned", "memory"), recipe_with_cache(cache="there"),
        recipe_with_cache(),
    )  # fmt: skip
    cached_positions(changed, items[:3], there, FeatureOptions(100))
    if place == "a cache of its own":
        cached_positions(base, items[3:] or items[:1], here, FeatureOptions(100))
    cache_folder(here).mkdir(exist_ok=True)
    (shard,) = shards(there)
    shutil.copy(shard, cache_folder(here))
    before = {path: path.read_bytes() for path in shards(here)}
    with pytest.raises(IncompatibleBaseError, match=f"{shard.name} .*base_fingerprint") as caught:
        cached_positions(base, items, here, FeatureOptions(100))
    assert "cache_dir" in caught.value.hint
    assert {path: path.read_bytes() for path in shards(here)} == before


def test_hidden_states_whose_index_is_lost_are_used(
    tiny_base, counting_rows, recipe_with_cache, monkeypatch
):
    base, recipe, items = tiny_base(), recipe_with_cache(), prepare(counting_rows(3), 4)
    cached_positions(base, items, recipe, FeatureOptions(100))
    index = cache_folder(recipe) / "index.json"
    whole = index.read_text()
    index.unlink()
    monkeypatch.setattr(feature_cache, "run", None)
    cached_positions(base, items, recipe, FeatureOptions(100))
    assert index.read_text() == whole


def test_a_file_whose_dtype_is_another_one_is_refused_though_no_row_of_it_is_needed(
    tiny_base, counting_rows, recipe_with_cache
):
    """All rows would be read in the dtype of the first file."""
    base, items = tiny_base(), prepare(counting_rows(6), 4)
    cached_positions(base, items[:3], recipe_with_cache(dtype="bfloat16"), FeatureOptions(100))
    (cache_folder(recipe_with_cache()) / "index.json").unlink()
    with pytest.raises(IncompatibleBaseError, match="dtype 'float32' ≠ 'bfloat16'"):
        cached_positions(base, items[3:], recipe_with_cache(), FeatureOptions(100))


def test_a_cache_with_an_old_fingerprint_is_made_again(
    tiny_base, counting_rows, recipe_with_cache, capsys
):
    base, items, recipe = tiny_base(), prepare(counting_rows(3), 4), recipe_with_cache()
    found = cached_positions(base, items, recipe, FeatureOptions(100))
    expected = found.rows(torch.arange(60))[0].clone()
    path = cache_folder(recipe) / "index.json"
    index = json.loads(path.read_text())
    old = Fingerprint.parse(base.info.fingerprint).output  # all that version 1 was
    shard = shards(recipe)[0]
    save_file(
        {"hidden_PD": expected + 1}, shard, {"rows": safe_open(shard, "pt").metadata()["rows"]}
    )
    path.write_text(json.dumps({**index, "base_fingerprint": old}))
    capsys.readouterr()
    found = cached_positions(base, items, recipe, FeatureOptions(100))
    assert "computed again" in capsys.readouterr().err
    torch.testing.assert_close(found.rows(torch.arange(60))[0], expected)
    assert json.loads(path.read_text())["base_fingerprint"] == base.info.fingerprint
    path.write_text(json.dumps({**index, "base_fingerprint": "of another"}))
    with pytest.raises(IncompatibleBaseError, match="base_fingerprint"):
        cached_positions(base, items, recipe, FeatureOptions(100))


def test_a_disk_that_is_too_small_is_refused_before_anything_is_computed(
    tiny_base, counting_rows, recipe_with_cache, monkeypatch
):
    base, recipe = tiny_base(), recipe_with_cache()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1000))
    monkeypatch.setattr(feature_cache, "run", None)
    with pytest.raises(MedusaKitError, match=r"0\.0 GB free; the hidden states need") as caught:
        cached_positions(base, prepare(counting_rows(3), 4), recipe, FeatureOptions(100))
    assert "train.features=live" in caught.value.hint
    assert not shards(recipe)


def test_hidden_states_that_the_base_computed_in_another_dtype_are_refused(
    tiny_base, counting_rows, recipe_with_cache, capsys
):
    """An index of an earlier version does not say in which."""
    recipe = recipe_with_cache()
    train_heads(tiny_base(torch.bfloat16), counting_rows(), recipe)
    with pytest.raises(IncompatibleBaseError, match=r"base_dtype 'float32' ≠ 'bfloat16'"):
        train_heads(tiny_base(), counting_rows(), recipe, fresh=True)
    index = cache_folder(recipe) / "index.json"
    stored = json.loads(index.read_text())
    del stored["base_dtype"]
    index.write_text(json.dumps(stored))
    capsys.readouterr()
    train_heads(tiny_base(torch.bfloat16), counting_rows(), recipe, fresh=True)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("does not say with which dtype of the base") == 1
    assert json.loads(index.read_text())["base_dtype"] == "bfloat16"

"""What was made when text was tokenized differently is not mixed with what is made now."""

import json
from dataclasses import replace

import pytest
import torch
from support.text.other_encodings import with_pairs

from medusa_kit.base.model import wrap_model
from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.heads import load_heads
from medusa_kit.heads.checkpoint import write_config
from medusa_kit.train.data import prepare
from medusa_kit.train.features import cache as feature_cache
from medusa_kit.train.features.cache import cache_folder, cached_positions
from medusa_kit.train.features.features import FeatureOptions
from medusa_kit.train.run.folder import RunFolder
from medusa_kit.train.trainer import train_heads

pytestmark = pytest.mark.usefixtures("often")


@pytest.fixture
def base_reading(tiny_base):
    """The same weights with a tokenizer; training is given tokens, which are not its own."""

    def build(single_digits):
        return wrap_model(tiny_base().model, with_pairs(single_digits))

    return build


def change(path, **values):
    """Set keys of a JSON file; `encoding` is removed."""
    found = {**json.loads(path.read_text()), **values}
    del found["encoding"]
    path.write_text(json.dumps(found))


@pytest.fixture
def stopped(base_reading, killed):
    """(base, recipe) of a run that was killed after a checkpoint."""
    base = base_reading(False)
    return base, killed(base)


def test_a_run_does_not_go_on_with_another_encoding(stopped, base_reading, counting_rows):
    base, recipe = stopped
    with pytest.raises(ConfigError, match="with another tokenizer or chat template") as caught:
        train_heads(base_reading(True), counting_rows(), recipe)
    assert "--fresh" in caught.value.hint
    base.tokenizer.chat_template += "!"  # the data say whether its tokens are the same
    report = train_heads(base, counting_rows(), recipe)
    assert load_heads(report.heads_folder, base).config.encoding == base.encoding


def test_a_checkpoint_of_an_older_version_goes_on_with_the_same_tokens(
    stopped, base_reading, counting_rows, capsys
):
    base, recipe = stopped
    change(RunFolder(recipe).load().folder / "progress.json")
    train_heads(base, counting_rows(), recipe)
    assert "continuing from update 4" in capsys.readouterr().err


@pytest.mark.parametrize("then", ["other", "other turns", "unknown"])
def test_hidden_states_are_computed_again(
    base_reading, counting_rows, make_recipe, monkeypatch, capsys, then
):
    base, items, options = base_reading(True), prepare(counting_rows(3), 4), FeatureOptions(100)
    recipe = make_recipe(train={"features": "disk", "cache_dtype": "float32"})
    maker = base_reading(then != "other")
    if then == "other turns":
        maker.tokenizer.chat_template = "{{ messages }}"
    assert maker.tokenizer.get_vocab() == base.tokenizer.get_vocab()
    expected = cached_positions(maker, items, recipe, options).rows(torch.arange(60))[0].clone()
    index = cache_folder(recipe) / "index.json"
    if then == "unknown":
        change(index)
    computed, original = [], feature_cache.run
    monkeypatch.setattr(feature_cache, "run", lambda *of: computed.append(1) or original(*of))
    found = cached_positions(base, items, recipe, options)
    assert computed
    assert "computed again" in capsys.readouterr().err
    assert json.loads(index.read_text())["encoding"] == base.encoding
    torch.testing.assert_close(found.rows(torch.arange(60))[0], expected)
    computed.clear()
    cached_positions(base, items, recipe, options)
    assert not computed
    change(index, dtype="bfloat16")
    with pytest.raises(IncompatibleBaseError, match="made differently"):
        cached_positions(base, items, recipe, options)


@pytest.mark.parametrize("then", ["now", "other", "unknown"])
def test_heads_say_how_the_text_was_encoded_that_they_learned(
    base_reading, counting_rows, make_recipe, tmp_path, then
):
    base = base_reading(True)
    source = tmp_path / "answers.jsonl"
    source.write_text("{}\n")
    digest = {"now": base.encoding, "other": base_reading(False).encoding, "unknown": None}[then]
    settings = {} if digest is None else {"encoding": digest}
    (tmp_path / "answers.jsonl.meta.json").write_text(json.dumps(settings))
    recipe = make_recipe(data={"sources": [str(source)], "eval_fraction": 0.2})
    heads = load_heads(train_heads(base, counting_rows(), recipe).heads_folder, base)
    assert heads.config.encoding == (base.encoding if then == "now" else None)


def test_earlier_heads_that_learned_another_encoding_are_told(
    base_reading, counting_rows, make_recipe, tmp_path, capsys
):
    base, first = base_reading(True), make_recipe(output_dir=str(tmp_path / "first"))
    folder = train_heads(base, counting_rows(), first).heads_folder
    later = make_recipe(output_dir=str(tmp_path / "later"), train={"heads_from": str(folder)})
    config = load_heads(folder, base).config
    write_config(folder, replace(config, encoding=base_reading(False).encoding))
    capsys.readouterr()
    report = train_heads(base, counting_rows(), later)
    assert "they learn it as it is tokenized now" in capsys.readouterr().err
    assert load_heads(report.heads_folder, base).config.encoding == base.encoding

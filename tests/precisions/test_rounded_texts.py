"""Hidden states to train on, in the precision of `base.activations`: the bits of steps in it.

Shapes: P positions, D hidden, N nodes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.kernels.rounded import PRECISIONS, gguf_file, multiplies_integers
from support.typed import typed_command
from torch import Tensor

from medusa_kit.data.chat import EncodedExample
from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.infer.cpu.packed_base import base_for_decoding
from medusa_kit.infer.forest import Forest
from medusa_kit.infer.runners.backends import prepare_backends
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.data import on_all_tokens, prepare
from medusa_kit.train.features.cache import INDEX, cache_folder, cached_positions
from medusa_kit.train.features.features import FeatureOptions, collect_features
from medusa_kit.train.trainer import load_base

pytestmark = pytest.mark.skipif(not multiplies_integers(), reason="no integers are multiplied here")
KIND = "Q4_K"
TEXTS = [[3, 7, 11, 2, 9, 5], [8, 1, 4, 30, 12, 6, 17, 22, 3], [5] * 14]


def rows() -> list[Any]:
    """Every token of each text is trained on."""
    examples = [EncodedExample(ids, [True] * len(ids), n + 1) for n, ids in enumerate(TEXTS)]
    return on_all_tokens(prepare(examples, 1))


def by_steps(activations: str) -> dict[int, Tensor]:
    """hidden_PD of each text by its length, a token at a time."""
    base = base_for_decoding(str(gguf_file(KIND)), device="cpu")
    verifier, found = prepare_backends(base, activations=activations).verifier, {}
    for text in TEXTS:
        cache, states = verifier.new_cache(1, len(text)), []
        for token in text:
            node = Forest.chains([[token]], torch.device("cpu"))
            states.append(verifier.score(cache, node, [0]).hidden_ND[0].clone())
            cache.commit([range(1)], [0])
        found[len(text)] = torch.stack(states)
    return found


def recipe_in(folder: Path, activations: str = "float32") -> TrainRecipe:
    return TrainRecipe.model_validate({
        "output_dir": str(folder / "run"),
        "base": {"model": str(gguf_file(KIND)), "activations": activations, "device": "cpu"},
        "heads": {"num_heads": 1},
        "data": {"sources": [str(folder / "rows.jsonl")], "eval_fraction": 0.2, "train_on": "all"},
        "deepspeed": {"enabled": False},
        "train": {"features": "disk", "cache_dir": str(folder / "cache"), "epochs": 1,
                  "cache_dtype": "float32", "micro_batch_positions": 16, "chunk_positions": 16},
    })  # fmt: skip


@pytest.mark.parametrize("activations", ["float32", *PRECISIONS])
def test_texts_have_the_bits_of_steps(activations: str) -> None:
    base = base_for_decoding(str(gguf_file(KIND)), device="cpu", text_activations=activations)
    expected, items = by_steps(activations), rows()
    found = collect_features(base, items, FeatureOptions(16)).hidden_PD
    longest_first = sorted(items, key=lambda item: -len(item.input_ids))
    for item in longest_first:
        part, found = found.split([len(item.positions_P), len(found) - len(item.positions_P)])
        assert torch.equal(part, expected[len(item.input_ids)][item.positions_P])
    others = by_steps("float32")
    same = all(torch.equal(expected[n], others[n]) for n in expected)
    assert same == (activations == "float32")


def test_a_cache_is_of_one_precision(tmp_path: Path) -> None:
    """An index that says none is of an older version, and so of float32."""
    items, options = rows(), FeatureOptions(16)
    bases = {name: base_for_decoding(str(gguf_file(KIND)), device="cpu", text_activations=name)
             for name in ("float32", "int8")}  # fmt: skip
    recipe = recipe_in(tmp_path)
    cached_positions(bases["float32"], items, recipe, options)
    index = cache_folder(recipe) / INDEX
    said = json.loads(index.read_text())
    assert said.pop("activations") == "float32"
    index.write_text(json.dumps(said))
    cached_positions(bases["float32"], items, recipe, options)
    with pytest.raises(IncompatibleBaseError, match="activations 'int8' ≠ 'float32'"):
        cached_positions(bases["int8"], items, recipe, options)


def test_training_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_file, recipe_file = tmp_path / "rows.jsonl", tmp_path / "recipe.yaml"
    lines = [{"prompt_ids": ids[:2], "response_ids": ids[2:], "finish_reason": "length",
              "id": str(n)}
             for n, ids in enumerate([*TEXTS, TEXTS[0][::-1]])]  # fmt: skip
    rows_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe_file.write_text(yaml.safe_dump(recipe_in(tmp_path, "int8").model_dump()))
    call = typed_command(monkeypatch, capsys, "train")
    code, _, stderr = call(recipe_file)
    assert code == 0, stderr
    assert json.loads((tmp_path / "cache" / INDEX).read_text())["activations"] == "int8"
    code, _, stderr = call(recipe_file, "base.device=cuda")
    assert code == 2
    assert "cuda" in stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": "medusa2", "train": {}}, "'int8' with stage 'medusa2': torch computes"),
        (
            {"train": {"runners_up": True, "loss": "soft", "soft_share": 1, "soft_top": "all"}},
            "'int8' with train.runners_up: torch computes",
        ),
        ({"base": {"model": "m", "activations": "int8", "dtype": "bfloat16"}}, "with dtype 'bf"),
    ],
)
def test_where_torch_computes_them(tmp_path: Path, changes: Any, message: str) -> None:
    given = {
        "output_dir": "out",
        "data": {"sources": ["rows.jsonl"]},
        "base": {"model": "m", "activations": "int8"},
    }
    TrainRecipe.model_validate(given)
    with pytest.raises(ValueError, match=message):
        TrainRecipe.model_validate({**given, **changes})


def test_a_loader_of_torch_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load_base_model loads a model of torch") as raised:
        load_base(recipe_in(tmp_path, "int8"), torch.device("cpu"))
    assert "base_for_decoding" in str(raised.value.hint)


def test_weights_that_are_floats() -> None:
    with pytest.raises(ConfigError, match="int8 need quantised weights in C\\+\\+; 'debug-tiny'"):
        base_for_decoding("debug-tiny", device="cpu", text_activations="int8")

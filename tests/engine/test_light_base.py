"""Light bases: decoding, serving, calibration and training of heads need no transformers model."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.debug_model import ROOT
from support.small_engines import random_heads
from support.tiny_models import model_of
from transformers import AutoModelForCausalLM

import medusa_kit
from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.base.loading import load_base_model
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError
from medusa_kit.heads import save_heads
from medusa_kit.infer import self_check
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed.int8_weights import with_weights
from medusa_kit.infer.cpu.packed_base import PackedBase, base_for_decoding
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.settings.recipe import load_recipe
from medusa_kit.train.trainer import train

pytestmark = pytest.mark.skipif(
    kernels.load_library() is None, reason="the C++ kernels cannot be built on this machine"
)
PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A chat model in a folder, and a cache folder of the module's own."""
    root = tmp_path_factory.mktemp("light")
    tokenizer = byte_tokenizer()
    model = model_of(
        "llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEDUSA_KIT_CACHE", str(root / "cache"))
        yield root / "model"


@pytest.fixture
def light(folder: Path) -> PackedBase:
    base = base_for_decoding(str(folder))
    assert isinstance(base, PackedBase)
    return base


def test_answers_are_plain_generates(folder: Path) -> None:
    engine = medusa_kit.load(str(folder), heads="untrained")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)
    for drafter in ("medusa", "none", "auto"):
        result = engine.generate(PROMPT, max_new_tokens=24, drafter=drafter)
        assert result.token_ids == plain[0, len(PROMPT) :].tolist()
        assert result.stats.steps_run_by.startswith("C++")
    drawn = engine.generate(PROMPT, max_new_tokens=8, temperature=0.8, top_p=0.9)
    full = medusa_kit.load(str(folder), heads=None, attention="sdpa")
    assert not full.base.is_light
    same = full.generate(PROMPT, max_new_tokens=8, temperature=0.8, top_p=0.9)
    assert drawn.token_ids == same.token_ids
    assert isinstance(engine.base, PackedBase)
    assert not engine.base.is_loaded


def test_it_is_described_as_the_whole_model_is(light: PackedBase, folder: Path) -> None:
    full = load_base_model(str(folder), device="cpu")
    assert light.info == full.info
    assert light.stop_token_ids == full.stop_token_ids
    ours, theirs = light.generation_config.to_dict(), full.generation_config.to_dict()
    assert ours == theirs
    ids = torch.tensor([[3, 250], [-1, 0]])
    assert torch.equal(light.token_embeddings(ids), full.token_embeddings(ids))
    for mine, other in zip(light.output_rows(ids[0]), full.output_rows(ids[0]), strict=True):
        assert mine is other is None or torch.equal(mine, other)
    hidden = torch.randn(2, light.info.hidden_size)
    assert torch.equal(light.head_logits(hidden), full.head_logits(hidden))
    assert light.embedding_size == full.embedding_size
    assert not light.is_loaded


def test_hidden_states_are_the_models(light: PackedBase, folder: Path) -> None:
    full = load_base_model(str(folder), device="cpu")
    ids = torch.randint(0, 200, (3, 40))
    mask = torch.ones_like(ids)
    mask[0, 7:], mask[2, 1:] = 0, 0
    for given in (
        (),
        (mask,),
        (None, torch.cat([torch.arange(25), torch.arange(15)]).expand(3, 40)),
    ):
        ours, theirs = (base.traced_hidden_states(ids, *given) for base in (light, full))
        real = mask.bool() if given[:1] == (mask,) else torch.ones_like(mask).bool()
        if len(given) == 2:  # positions that begin anew hide what is before them
            theirs = torch.cat(
                [full.hidden_states(ids[:, :25]), full.hidden_states(ids[:, 25:])], 1
            )
        assert torch.allclose(ours[real], theirs[real], atol=1e-4)
    assert torch.equal(light.hidden_states(ids)[:2], light.hidden_states(ids[:2]))
    assert not light.is_loaded
    with pytest.raises(ValueError, match="padded on the right"):
        light.hidden_states(ids, mask.flip(1))


def test_what_does_not_fit_in_cpp_loads_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = medusa_kit.load(str(folder), heads="untrained", guesses="all")
    expected = engine.generate(PROMPT, max_new_tokens=12, drafter="none").token_ids
    assert not engine.base.is_loaded  # type: ignore[attr-defined]
    monkeypatch.setattr(kernels, "MAX_ROWS", 4)
    engine.scheduler = Scheduler(engine.verifier)
    tree = [[0], [1], [2], [0, 0], [0, 1], [0, 0, 0]]
    engine = medusa_kit.load(str(folder), heads="untrained", tree=tree, guesses="all")
    result = engine.generate(PROMPT, max_new_tokens=12, drafter="medusa")
    assert result.token_ids == expected
    assert engine.base.is_loaded  # type: ignore[attr-defined]
    assert "loading the whole of" in capsys.readouterr().err


def test_int8_weights_are_those_of_the_rounded_model(folder: Path) -> None:
    engine = medusa_kit.load(str(folder), heads=None, weights="int8")
    assert engine.base.is_light
    assert engine.weights == "int8"
    full = with_weights(load_base_model(str(folder), device="cpu"), "int8")
    ids = torch.tensor([PROMPT])
    assert torch.allclose(engine.base.hidden_states(ids), full.hidden_states(ids), atol=1e-4)
    with pytest.raises(ConfigError, match="load the base again"):
        with_weights(engine.base, "checkpoint")


def test_a_check_that_passed_is_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = medusa_kit.load(str(folder), heads=None, check=True)
    said = capsys.readouterr().err
    assert "checking drafting against plain decoding" in said
    second = medusa_kit.load(str(folder), heads=None)
    assert "checking" not in capsys.readouterr().err
    assert not first.check.remembered
    assert second.check == dataclasses.replace(first.check, remembered=True)
    assert second.generate(PROMPT, max_new_tokens=2).stats.check_remembered
    assert first.verifier.attention.name == second.verifier.attention.name

    def wrong(*_: object) -> tuple[float, float]:
        return 1.0, 2.0

    with monkeypatch.context() as patch:
        patch.setattr(self_check, "_measure", wrong)
        assert medusa_kit.load(str(folder), heads=None).check.remembered
        with pytest.raises(IncompatibleBaseError):
            medusa_kit.load(str(folder), heads=None, check=True)
    assert medusa_kit.load(str(folder), heads=None).check == second.check


@pytest.mark.parametrize("damage", ["", "{", '{"figures": {"relative_error": -1.0}}', "null"])
def test_a_damaged_memory_of_a_check_is_no_check(
    folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(tmp_path))
    medusa_kit.load(str(folder), heads=None)
    records = list((tmp_path / "checks").iterdir())
    assert records
    for record in records:
        record.write_text(damage)
    assert not medusa_kit.load(str(folder), heads=None).check.remembered
    assert medusa_kit.load(str(folder), heads=None).check.remembered


def test_a_check_with_other_settings_is_run(folder: Path, tmp_path: Path) -> None:
    """Windows and rotary embeddings are not in the weights."""
    medusa_kit.load(str(folder), heads=None)
    shutil.copytree(folder, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] = 100.0
    path.write_text(json.dumps(config))
    for attention in ("auto", "sdpa"):
        medusa_kit.load(str(folder), heads=None, attention=attention)
        other = medusa_kit.load(str(tmp_path / "other"), heads=None, attention=attention)
        assert not other.check.remembered
        again = medusa_kit.load(str(tmp_path / "other"), heads=None, attention=attention)
        assert again.check.remembered


def test_files_changed_after_loading_are_not_taken_for_the_model(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    base = base_for_decoding(str(tmp_path / "copy"))
    assert isinstance(base, PackedBase)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.get_output_embeddings().weight.data[7] += 1
    model.save_pretrained(tmp_path / "copy")
    with pytest.raises(CheckpointError, match="other weights than when it was loaded"):
        _ = base.model
    assert not base.is_loaded


@pytest.mark.parametrize(("change", "by"), [("num_hidden_layers", 1), ("vocab_size", 64)])
def test_weights_that_do_not_fit_the_config_are_refused(
    change: str, by: int, folder: Path, tmp_path: Path
) -> None:
    """transformers would fill a layer that is missing with random numbers."""
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, change: config[change] + by}))
    with pytest.raises(CheckpointError):
        medusa_kit.load(str(tmp_path / "model"), heads=None)


def test_heads_learn_the_same_from_a_light_base(folder: Path, tmp_path: Path) -> None:
    reports = []
    for name, load in (("light", base_for_decoding), ("full", load_base_model)):
        seen = []

        def loaded(*args: object, load=load, seen=seen, **options: object):  # type: ignore[no-untyped-def]
            seen.append(load(*args, **options))
            return seen[-1]

        recipe = load_recipe(ROOT / "recipes/debug.yaml", [
            f"base.model={folder}", f"output_dir={tmp_path / name}", "deepspeed.enabled=false",
            "base.device=cpu", "train.epochs=1",
        ])  # fmt: skip
        train(recipe, load_frozen=loaded)
        (base,) = seen
        assert base.is_light == (name == "light")
        assert not getattr(base, "is_loaded", False)
        metrics = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        reports.append([json.loads(line) for line in metrics])
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in reports]
    assert losses[0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


COMMANDS = """
    import io, sys
    from medusa_kit import cli
    from medusa_kit.infer.cpu.packed_base import PackedBase

    def refuse(base):
        raise AssertionError("the model was asked for")

    PackedBase.model = property(refuse)
    model, recipe, folder, prompts = sys.argv[1:]

    def run(*arguments):
        sys.argv = ["medusa-kit", *arguments]
        try:
            cli.main()
        except SystemExit as leaving:
            assert not leaving.code, arguments

    run("generate", "Hi", "-m", model, "-n", "3", "--heads", "untrained")
    sys.stdin = io.StringIO("Hi\\n")
    run("chat", "-m", model, "-n", "3")
    run("data", "generate", prompts, "-o", f"{folder}/answers.jsonl", "-m", model, "-n", "4")
    import medusa_kit
    from medusa_kit.serve.app import create_app
    from medusa_kit.serve.service import Service
    from medusa_kit.settings.serve import ServeConfig
    from starlette.testclient import TestClient

    service = Service(medusa_kit.load(model), ServeConfig(log_format="none"))
    with TestClient(create_app(service), "http://localhost") as client:
        chat = [{"role": "user", "content": "Hi"}]
        name = service.names.entries()[0]["id"]
        asked = {"model": name, "messages": chat, "max_tokens": 3}
        answer = client.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text
    service.close(drain=False)
    heavy = {"transformers.modeling_utils", "torch._dynamo", "transformers.generation.utils"}
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
    run("train", recipe, f"base.model={model}", f"output_dir={folder}/run", "train.epochs=1",
        "deepspeed.enabled=false", "base.device=cpu")
    run("tree-search", "-m", model, "--heads", f"{folder}/run/heads", "--prompts", prompts, "-n",
        "8", "--sizes", "1,2", "--limit", "2")
"""


GENERATE = """
import sys
from medusa_kit import cli

model, *folders = sys.argv[1:]
for folder in folders:
    sys.argv = ["medusa-kit", "generate", "Hi", "-n", "3", "-m", model, "--heads", folder]
    try:
        cli.main()
    except SystemExit as leaving:
        assert not leaving.code
unneeded = {
    "sympy", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes",
    "transformers.generation.utils", "transformers.modeling_utils", "triton",
    "torch.utils.cpp_extension",
}
print(sorted(unneeded & set(sys.modules)))
"""


@pytest.mark.slow
def test_decoding_with_heads_imports_no_compiler(
    light: PackedBase, folder: Path, tmp_path: Path
) -> None:
    given = [str(tmp_path / kind) for kind in ("medusa", "hydra", "recurrent")]
    for one in given:
        save_heads(random_heads(light, kind=Path(one).name), Path(one))
        medusa_kit.load(str(folder), heads=one)  # which packs them
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(folder), *given], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    for one in given:
        name = f"packed/{Path(one).name}-*/weights.packed"
        assert list(Path(os.environ["MEDUSA_KIT_CACHE"]).glob(name)), one


@pytest.mark.slow
def test_commands_need_neither_the_model_nor_its_code(folder: Path, tmp_path: Path) -> None:
    medusa_kit.load(str(folder), heads=None)  # once, which reads and checks the model
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Name a tree.\nSay hello.\n")
    given = [folder, ROOT / "recipes/debug.yaml", tmp_path, prompts]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMMANDS), *map(str, given)],
        capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "answers.jsonl").read_text().count("\n") == 2
    assert (tmp_path / "run/heads/tree.json").is_file()

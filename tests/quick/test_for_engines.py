"""`train --quick --for ENGINE`: heads that this engine loads, said before and proved after."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine_loaders import LOADERS
from support.typed import typed_command

from medusa_kit import console
from medusa_kit.base.loading import load_base_model
from medusa_kit.errors import ConfigError
from medusa_kit.heads import load_heads
from medusa_kit.heads.formats.engines import ENGINES, formats_for
from medusa_kit.quick import settings, trial
from medusa_kit.quick.run import prepared, run
from medusa_kit.quick.session import Request
from medusa_kit.settings.recipe import HeadsSection

Build = Callable[..., Request]
Typed = Callable[..., tuple[int, str, str]]
COLUMNS = 100  # of 259


@pytest.fixture
def typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Typed:
    """A command in a folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.setattr(console.out, "width", 160)
    monkeypatch.setattr(console.err, "width", 400)
    monkeypatch.setattr(settings, "COLUMNS", COLUMNS)
    monkeypatch.chdir(tmp_path)

    return typed_command(monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "tgi"])
def test_from_prompts_to_heads_that_the_engine_loads(
    typed: Typed, prompt_file: Path, engine: str
) -> None:
    """The plan begins with who will load them, and the last line converts them."""
    code, out, err = typed("train", "--quick", "--for", engine, "-m", "debug-tiny", "--prompts",
                           prompt_file.name, "--device", "cpu")  # fmt: skip
    assert code == 0, err
    said = err.splitlines()[0]
    assert f"heads of kind medusa for {ENGINES[engine]}: medusa-kit" in said
    assert f"acceptance length, a chain as in {ENGINES[engine]}" in out

    last, _, what = out.splitlines()[-1].strip().partition("  ")
    assert what.strip() == f"heads for {ENGINES[engine]}; prints how to serve them"
    code, serving, err = typed(*shlex.split(last)[1:])
    assert code == 0, err
    assert f"heads-debug-tiny-{engine}/{engine}" in serving

    base = load_base_model("debug-tiny", dtype="float32", device="cpu")
    heads = load_heads(Path(f"heads-debug-tiny-{engine}/run/heads"), base)
    hidden_BD = torch.randn(5, base.info.hidden_size, generator=torch.Generator().manual_seed(0))
    weight_VD = base.output_embedding.weight.detach()
    written = in_float32(Path(f"heads-debug-tiny-{engine}/{engine}"))
    theirs_KBV = LOADERS[engine](written, hidden_BD, weight_VD)
    ids_R = heads.column_ids if engine == "vllm" else torch.arange(base.info.vocab_size)
    assert (len(ids_R) <= COLUMNS) == (engine == "vllm")
    for k, theirs_BV in enumerate(theirs_KBV):
        block = heads.blocks[k][0].linear
        after_BD = hidden_BD + torch.nn.functional.silu(block(hidden_BD))
        torch.testing.assert_close(theirs_BV[:, ids_R], after_BD @ weight_VD[ids_R].T)


def in_float32(folder: Path) -> Path:
    """Engines copy weights into their own dtype, whatever the file has."""
    (file,) = folder.glob("*.safetensors")
    tensors = {name: one.float() if one.is_floating_point() else one
               for name, one in load_file(file).items()}  # fmt: skip
    save_file(tensors, file)
    return folder


def test_another_engine_needs_another_folder(request_for: Build, tmp_path: Path) -> None:
    """A run stays with the engine that it began for; older records were for medusa-kit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "measure", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(prepared(request_for(engine="vllm")))
    prepared(request_for(engine="vllm"))
    prepared(request_for(engine="vllm", hours=0.02))
    for engine in ("kit", "tgi"):
        with pytest.raises(ConfigError, match=f"for '{engine}' ≠ 'vllm'") as refused:
            prepared(request_for(engine=engine))
        assert "name another folder with --output, or add --fresh" in str(refused.value)
    record = tmp_path / "heads/quick.json"
    then = json.loads(record.read_text())
    del then["settings"]["for"]
    record.write_text(json.dumps(then))
    prepared(request_for())
    with pytest.raises(ConfigError, match="for 'vllm' ≠ 'kit'"):
        prepared(request_for(engine="vllm"))


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_unknown_engine_is_told_before_anything_else(typed: Typed) -> None:
    code, out, err = typed("train", "--quick", "--for", "vlm", "--prompts", "nowhere.txt")
    assert (code, out) == (2, "")
    assert "--for 'vlm' is unknown; expected one of kit, vllm, tgi" in err
    assert "did you mean vllm" in err
    for other, hint in (("lorax", "--for tgi"), ("trt-llm", "--for tgi"), ("vLLM", "mean vllm?")):
        code, _, err = typed("train", "--quick", "--for", other, "--prompts", "nowhere.txt")
        assert (code, hint in err) == (2, True)
    code, _, err = typed("train", "recipe.yaml", "--for", "vllm")
    assert (code, "only --quick takes --for" in err) == (2, True)


@pytest.mark.parametrize("engine", ["kit", "vllm", "tgi"])
@pytest.mark.parametrize("vocab_size", [None, 256, 128_256])
def test_the_heads_of_every_vocabulary_suit_their_engine(
    engine: str, vocab_size: int | None
) -> None:
    heads = HeadsSection.model_validate(settings.heads_for(engine, vocab_size))  # type: ignore
    held = formats_for(heads)
    assert (engine in held) == (engine != "kit")
    if engine == "kit":
        assert held == []

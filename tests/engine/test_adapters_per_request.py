"""LoRA adapters with their heads (Medusa-2), by request: beside the base and each other.

The reference is a model that the adapter has been merged into, by peft, decoded by transformers.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import put_adapter
from support.batches import Serving
from support.small_engines import build_engine, random_heads, random_prompt
from support.tiny_models import tiny_base, tiny_model

from medusa_kit.base import adapters
from medusa_kit.base.model import wrap_model
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.heads_store import HeadsStore
from medusa_kit.errors import CheckpointError, ConfigError, IncompatibleBaseError, MedusaKitError
from medusa_kit.heads import save_heads
from medusa_kit.infer.cpu.verifier import NativeVerifier
from medusa_kit.infer.decode.request import Request

LONGEST = 12


def merged_answer(folder: Path | None, prompt: list[int]) -> list[int]:
    model = tiny_model("llama")
    if folder is not None:
        model = adapters.merge_into(model, folder)
    with torch.no_grad():
        out_1T = model.generate(
            torch.tensor([prompt]), max_new_tokens=LONGEST, do_sample=False,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )  # fmt: skip
    return out_1T[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    for name, seed, num_heads in (("first", 1, 2), ("second", 2, 3)):
        put_adapter(folder / name, lambda: tiny_model("llama"), "llama", seed, num_heads)
    save_heads(random_heads(tiny_base("llama"), 2), folder / "plain")
    return folder


@pytest.fixture
def engine() -> Engine:
    base = wrap_model(tiny_model("llama"), None, "llama")
    return build_engine(base, attention="sdpa")


@pytest.mark.parametrize("fixed_shapes", ["never", "always"])
def test_each_request_gets_its_adapter(root: Path, fixed_shapes: str) -> None:
    """By heads, prompt lookup and no drafter, and the base stays as it is beside them, where its
    steps may run whole on the device, too."""
    base = wrap_model(tiny_model("llama"), None, "llama")
    engine = build_engine(base, attention="sdpa", fixed_shapes=fixed_shapes)
    asks: list[tuple[str | None, dict[str, Any]]] = [
        ("first", {}), (None, {}), ("second", {}), ("plain", {}), ("first", {}),
        ("second", {"drafter": "prompt-lookup"}), ("first", {"drafter": "none"}),
        (None, {"drafter": "prompt-lookup"}),
    ]  # fmt: skip
    prompts = [random_prompt(5 + number, number) for number in range(len(asks))]
    with HeadsStore(engine, root) as store, engine.shared_batch(max_rows=4) as shared:
        answers = []
        for prompt, (name, options) in zip(prompts, asks, strict=True):
            heads = {} if name is None else {"heads": store.get(name)}
            answers.append(shared.submit(prompt, max_new_tokens=LONGEST, **heads, **options))
        changed = 0
        for prompt, (name, _), answer in zip(prompts, asks, answers, strict=True):
            folder = None if name in (None, "plain") else root / str(name)
            expected = merged_answer(folder, prompt)
            assert answer.result().token_ids == expected
            changed += folder is not None and expected != merged_answer(None, prompt)
        assert changed == 5
        assert answers[0].result().stats.nodes_per_step == 3.0
        assert not any(status.in_use for status in store.statuses())
        told = {status.name: status for status in store.statuses()}
        assert (told["second"].kind, told["second"].num_heads) == ("medusa", 3)
        assert told["first"].num_bytes > told["plain"].num_bytes
    assert not any(module._forward_hooks for module in engine.base.model.modules())


def test_an_adapter_that_is_written_over_stays_loaded(
    root: Path, engine: Engine, tmp_path: Path
) -> None:
    shutil.copytree(root / "first", tmp_path / "first")
    prompt = random_prompt(6, 1)
    expected = merged_answer(tmp_path / "first", prompt)
    with (
        HeadsStore(engine, tmp_path) as store,
        engine.shared_batch() as shared,
        store.get("first") as lease,
    ):
        path = tmp_path / "first" / "adapter_model.safetensors"
        path.write_bytes(bytes(path.stat().st_size))
        answer = shared.submit(prompt, max_new_tokens=LONGEST, heads=lease)
        assert answer.result().token_ids == expected != merged_answer(None, prompt)


def test_adapters_take_turns(root: Path, engine: Engine) -> None:
    """One step each, whatever the number of their rows."""
    scheduler = Serving(engine.verifier, 4)
    group_of = dict[Request, str]()
    drafters = []
    with HeadsStore(engine, root) as store:
        for name, count in (("base", 3), ("first", 1), ("second", 2)):
            own = engine if name == "base" else store.get(name).engine
            drafters.append(own.drafter_for("none"))
            for number in range(count):
                row = own.request_for("add", random_prompt(4, number), 6, None, {})[0]
                row.stop_ids = frozenset()
                group_of[row] = name
                scheduler.add(row, drafters[-1])
    served, left = list[str](), list[Request]()
    for _ in range(30):
        groups = {group_of[row] for row, _ in scheduler.step()}
        left += scheduler.take_finished()
        served += groups
        assert len(groups) <= 1
    assert served == ["base", "first", "second"] * 6
    assert sorted(group_of[row] for row in left) == sorted(group_of.values())
    assert [batch.verifier for batch in scheduler.batches.used] == [engine.verifier]


def test_adapters_that_cannot_be_served_are_refused(
    root: Path, engine: Engine, tmp_path: Path
) -> None:
    changes: list[tuple[str, str, Any, type[MedusaKitError], str]] = [
        ("pattern", "adapter_config.json", {"alpha_pattern": {"q": 3}}, CheckpointError, "LORA"),
        ("kind", "adapter_config.json", {"peft_type": "LOHA"}, CheckpointError, "'LOHA'"),
        ("base", "medusa_kit.json", {"base_fingerprint": "0" * 32}, IncompatibleBaseError, "print"),
    ]  # fmt: skip
    for name, file, change, _, _ in changes:
        shutil.copytree(root / "first", tmp_path / name)
        path = tmp_path / name / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    shutil.copytree(root / "first", tmp_path / "cut")
    weights = tmp_path / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    shutil.copytree(root / "first", tmp_path / "swapped")
    shutil.copy(root / "second" / "adapter_model.safetensors", tmp_path / "swapped")
    with HeadsStore(engine, tmp_path) as store:
        for name, _, _, kind, message in changes:
            with pytest.raises(kind, match=message):
                store.get(name)
        with pytest.raises(CheckpointError, match="cannot be read"):
            store.get("cut")
        with pytest.raises(IncompatibleBaseError, match="do not fit"):  # heads of another adapter
            store.get("swapped")


def test_steps_on_packed_weights_refuse_adapters(root: Path) -> None:
    engine = build_engine(wrap_model(tiny_model("llama-tied"), None, "llama-tied"))
    if not isinstance(engine.verifier, NativeVerifier):
        pytest.skip("no compiler")
    with (
        HeadsStore(engine, root) as store,
        pytest.raises(ConfigError, match="come with a LoRA adapter"),
    ):
        store.get("first")

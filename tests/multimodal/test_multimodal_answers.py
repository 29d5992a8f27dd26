"""The text part of multimodal checkpoints: the numbers and the answers of the whole model.

The reference is transformers' whole class, towers included, which reads the folder by itself.
"""

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from support.multimodal.whole_models import MULTIMODAL, tiny_whole
from support.partly_knowing import PartlyKnowing
from support.small_engines import build_engine, random_prompt
from support.tiny_models import VOCAB, tiny_model
from transformers import AutoModel

import medusa_kit
from medusa_kit.base.layerwise import layerwise_model
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import wrap_model
from medusa_kit.base.remembered_configs import own_config, read_config
from medusa_kit.base.text_part import _no_towers, causal_model, load_causal
from medusa_kit.errors import ConfigError
from medusa_kit.infer.cpu.binding import kernels
from medusa_kit.infer.cpu.packed_base import PackedBase, base_for_decoding
from medusa_kit.infer.decode.request import make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.settings.sampling import SamplingParams

IN_CPP = ["gemma3", "gemma3-tied", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
CONVERTED = ["qwen3_vl_moe"]  # transformers turns the experts' matrices as it reads them
TOWERS = ("vision", "visual", "multi_modal", "audio", "embed_vision", "embed_audio", "projector")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("multimodal")
    for kind in MULTIMODAL:
        tiny_whole(kind).save_pretrained(root / kind)
    return {kind: root / kind for kind in MULTIMODAL}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, shared_cache: Path) -> None:
    monkeypatch.setenv("MEDUSA_KIT_CACHE", str(shared_cache))


def whole_answer(whole: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    made = whole.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_it_has_the_bits_of_the_whole_and_none_of_its_towers(
    kind: str, folders: dict[str, Path]
) -> None:
    place = str(folders[kind])
    model, found = load_causal(place, read_config(place), dtype=torch.float32)
    assert not found["missing_keys"]
    assert found["unexpected_keys"]
    assert all(any(part in name for part in TOWERS) for name in found["unexpected_keys"])
    names = {name for name, _ in model.named_modules()}
    assert not any(part in name for name in names for part in TOWERS)
    ids_BT = torch.randint(3, VOCAB, (3, 12))
    with torch.no_grad():
        assert torch.equal(model(ids_BT).logits, tiny_whole(kind)(ids_BT).logits)
    described = causal_model(own_config(read_config(place)))  # from the config alone
    assert type(described) is type(model)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in described.state_dict().items()} == shapes
    assert described.all_tied_weights_keys == model.all_tied_weights_keys


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_random_trees_in_a_batch(kind: str, folders: dict[str, Path]) -> None:
    base = load_base_model(str(folders[kind]), device="cpu")
    engine, whole = build_engine(base), tiny_whole(kind)
    assert engine.check.relative_error < 1e-4
    prompts = [random_prompt(length, length) for length in (1, 9, 20)]
    truths = {tuple(prompt): whole_answer(whole, prompt, 16) for prompt in prompts}
    assert len({token for answer in truths.values() for token in answer}) > 4, "proves too little"
    rows = [make_request(engine.verifier, prompt, SamplingParams(), 16) for prompt in prompts]
    for _ in Scheduler(engine.verifier).run(rows, PartlyKnowing(truths)):
        pass
    assert [row.token_ids for row in rows] == list(truths.values())
    assert sum(row.num_steps for row in rows) < sum(len(row.token_ids) for row in rows) - 3


@pytest.mark.parametrize("kind", [kind for kind in MULTIMODAL if kind not in CONVERTED])
def test_layer_by_layer(kind: str, folders: dict[str, Path]) -> None:
    ids_BT = torch.randint(3, VOCAB, (3, 12))
    with torch.no_grad():
        expected_BV = tiny_whole(kind)(ids_BT).logits[:, -1]
    found_BV = layerwise_model(str(folders[kind])).last_logits(ids_BT.tolist())
    assert torch.allclose(found_BV, expected_BV, atol=1e-5)


@pytest.mark.parametrize("kind", IN_CPP)
def test_steps_in_cpp(kind: str, folders: dict[str, Path]) -> None:
    if kernels.load_library() is None:
        pytest.skip("the C++ kernels cannot be built on this machine")
    engine = medusa_kit.load(str(folders[kind]), heads=None)
    assert isinstance(engine.base, PackedBase)
    assert engine.base.info == load_base_model(str(folders[kind]), device="cpu").info
    prompt = random_prompt(9, 9)
    result = engine.generate(prompt, max_new_tokens=16, drafter="suffix")
    assert result.token_ids == whole_answer(tiny_whole(kind), prompt, 16)
    assert result.stats.steps_run_by.startswith("C++")
    assert not engine.base.is_loaded


@pytest.mark.parametrize("kind", ["gemma3-tied", "qwen2_5_vl", "llama4"])
def test_a_text_part_that_was_saved_alone_is_the_same_base(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    base = load_base_model(str(folders[kind]), device="cpu")
    base.model.save_pretrained(tmp_path)
    alone = load_base_model(str(tmp_path), device="cpu")
    assert alone.info.fingerprint == base.info.fingerprint
    assert base_for_decoding(str(tmp_path)).info.fingerprint == base.info.fingerprint


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_inside_the_wholes_own_generate(kind: str, folders: dict[str, Path]) -> None:
    whole = tiny_whole(kind)
    ids_BT = torch.randint(3, VOCAB, (2, 9))
    request = {"attention_mask": torch.ones_like(ids_BT), "max_new_tokens": 10, "do_sample": False}
    plain_BT = whole.generate(ids_BT, **request)
    entry = medusa_kit.custom_generate
    assert torch.equal(whole.generate(ids_BT, **request, custom_generate=entry), plain_BT)
    assert torch.equal(whole.generate(ids_BT, **request), plain_BT)
    in_memory, loaded = wrap_model(whole).info, load_base_model(str(folders[kind])).info
    assert in_memory.fingerprint == loaded.fingerprint


def test_kinds_of_tokens_in_the_wholes_own_generate() -> None:
    """A processor tells them even where all are text."""
    whole = tiny_whole("gemma3")
    ids_BT = torch.randint(3, VOCAB, (1, 9))
    request = {"attention_mask": torch.ones_like(ids_BT), "max_new_tokens": 4, "do_sample": False,
               "custom_generate": medusa_kit.custom_generate}  # fmt: skip
    kinds_BT = torch.zeros_like(ids_BT)
    given_BT = whole.generate(ids_BT, token_type_ids=kinds_BT, **request)
    assert torch.equal(given_BT, whole.generate(ids_BT, **request))
    kinds_BT[0, 3] = 1
    with pytest.raises(ConfigError, match="token_type_ids"):
        whole.generate(ids_BT, token_type_ids=kinds_BT, **request)


def test_what_another_thread_builds_keeps_its_parts() -> None:
    config, other = tiny_whole("gemma3").config, tiny_model("llama").config
    found: list[Any] = []
    with _no_towers(config):
        thread = Thread(target=lambda: found.append(AutoModel.from_config(other)))
        thread.start()
        thread.join()
        empty = AutoModel.from_config(config.vision_config)
    assert list(found[0].parameters())
    assert not list(empty.parameters())

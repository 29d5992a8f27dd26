"""What tells one base model from another: every tensor, whatever the dtype it was loaded in."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_base, tiny_model
from torch import Tensor

from medusa_kit.base.fingerprint import (
    Fingerprint,
    Match,
    compare,
    tensor_digest,
    vectors_digest,
    whole_digest,
)
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.errors import IncompatibleBaseError
from medusa_kit.heads import MedusaHeads, load_heads, save_heads
from medusa_kit.heads.checkpoint import read_config, write_config

# One of each: attention, MLP, norms inside and at the end, embedding, output embedding.
TENSORS = (
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.2.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
)


def old_form(fingerprint: str) -> str:
    """The fingerprint of version 1."""
    return str(replace(Fingerprint.parse(fingerprint), whole=None))


@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_counts(name: str) -> None:
    changed = tiny_model("llama")
    weight = changed.get_parameter(name)
    weight.data.view(-1)[7] += 0.125
    assert wrap_model(changed).info.fingerprint != tiny_base("llama").info.fingerprint


@pytest.mark.parametrize("family", ["llama-tied", "gemma3", "gpt2", "mixtral"])
def test_the_load_dtype_does_not_count(family: str, tmp_path: Path) -> None:
    of_dtypes = {
        tiny_base(family, dtype=dtype).info.fingerprint for dtype in (torch.float32, torch.bfloat16)
    }
    assert len(of_dtypes) == 1
    tiny_model(family).save_pretrained(tmp_path)
    loaded = type(tiny_model(family)).from_pretrained(tmp_path)
    assert {wrap_model(loaded).info.fingerprint} == of_dtypes


def test_tensors_may_be_read_piece_by_piece() -> None:
    """Layer by layer, or in rows expanded from something packed: the same digest."""
    model = tiny_model("llama-tied")

    def rows(weight: Tensor) -> Iterator[Tensor]:
        for row in weight.detach().flatten().split(5):
            yield row.clone()

    digests = {
        name: tensor_digest(weight.shape, rows(weight))
        for name, weight in reversed(model.state_dict().items())
    }
    whole = Fingerprint.parse(wrap_model(model).info.fingerprint).whole
    assert whole_digest(digests) == whole
    assert whole_digest(digests, "a variant") != whole


def test_a_digest_is_the_same_everywhere() -> None:
    """Files outlive versions: these values must never change."""
    weight_XY = torch.arange(12, dtype=torch.float32).view(3, 4) / 7
    digest = tensor_digest(weight_XY.shape, [weight_XY])
    assert digest == "b5c5de893658bf049d66012f8ab2d8f3"
    assert digest != tensor_digest((4, 3), [weight_XY])
    assert whole_digest({"b": digest, "a": "0"}) == "072a353e2bcceb669474bf2367187e27"


def test_what_fingerprints_say_of_each_other() -> None:
    full, tuned, quantised = "2:aa:cc", "2:bb:cc", "2q:dd:cc"
    assert compare(full, full) is Match.SAME
    assert compare(full, tuned) is Match.OTHER
    assert compare(full, quantised) is compare(quantised, full) is Match.COPY
    assert compare("2q:dd:cc", "2q:ee:cc") is Match.COPY
    assert compare(full, "cc") is compare("cc", full) is Match.OLD
    assert compare("cc", "cc") is Match.SAME
    for other in ("2:aa:ee", "2q:aa:ee", "ee", "", None, "3:aa:cc", "4:aa:cc:vv", "2:aa:cc:vv"):
        assert compare(full, other) is Match.OTHER


def test_what_norms_and_biases_say() -> None:
    """They tell where nothing else does, and fingerprints of version 2 have none."""
    own = "3:aa:cc:vv"
    assert str(Fingerprint.parse(own)) == own
    assert compare(own, "2:aa:cc") is compare("2:aa:cc", own) is Match.SAME
    assert compare(own, "3:bb:cc:vv") is compare(own, "3:bb:ee:vv") is Match.SAME_NORMS
    assert compare(own, "3q:bb:cc:vv") is compare(own, "2q:bb:cc") is Match.COPY
    assert compare(own, "3q:bb:ee:vv") is Match.SAME_NORMS
    assert compare(own, "cc") is Match.OLD
    for other in ("3:bb:cc:ww", "2:bb:cc", "2:bb:ee", "ee"):
        assert compare(own, other) is compare(other, own) is Match.OTHER


def test_vectors_of_untrained_models_tell_nothing() -> None:
    vector, matrix = torch.linspace(-1, 1, 8), torch.randn(4, 8)
    trained = {"a.norm.weight": vector, "b.bias": torch.zeros(4), "w.weight": matrix}
    assert vectors_digest(trained) == "c22fbc6ab68a82488b480c7e3ae50854"
    same = {name: tensor.bfloat16() for name, tensor in trained.items()}
    assert vectors_digest({**same, "w.weight": matrix + 1, "A_log": vector}) == (
        vectors_digest(trained)
    )
    assert vectors_digest({**trained, "b.bias": torch.ones(4)}) != vectors_digest(trained)
    untrained = {"a.norm.weight": torch.ones(8), "b.bias": torch.zeros(4), "w.weight": matrix}
    assert vectors_digest(untrained) is None
    assert Fingerprint.parse(tiny_base("llama").info.fingerprint).vectors is None


def test_small_numbers_may_be_rounded_away() -> None:
    """A norm that was stored plus one, and one in float16."""
    vector = (torch.randn(4096) * torch.logspace(-9, 0, 4096)).bfloat16().float()
    digests = {
        vectors_digest({"norm.weight": numbers})
        for numbers in (vector, (vector + 1) - 1, vector.half())
    }
    assert len(digests) == 1


def test_heads_of_a_base_with_another_mlp_are_refused(tmp_path: Path) -> None:
    """Even with the same embedding, output embedding and final norm."""
    save_heads(MedusaHeads.for_base(tiny_base("llama"), 2), tmp_path)
    changed = tiny_model("llama")
    changed.model.layers[1].mlp.up_proj.weight.data *= 1.25
    with pytest.raises(IncompatibleBaseError, match="fingerprint"):
        load_heads(tmp_path, wrap_model(changed))


def with_fingerprint(folder: Path, change: str) -> None:
    config = read_config(folder)
    old = old_form(config.base_fingerprint)
    write_config(folder, replace(config, base_fingerprint=old if change == "old" else change))


def test_heads_with_an_old_fingerprint_load_with_a_note(
    llama: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_heads(MedusaHeads.for_base(llama, 2), tmp_path)
    load_heads(tmp_path, llama)
    assert capsys.readouterr().err == ""
    with_fingerprint(tmp_path, "old")
    load_heads(tmp_path, llama)
    assert "its fingerprint is an old one" in capsys.readouterr().err
    with pytest.raises(IncompatibleBaseError, match="fingerprint"):
        load_heads(tmp_path, tiny_base("llama", seed=1))


def test_heads_know_a_quantised_copy_of_their_base(
    llama: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_heads(MedusaHeads.for_base(llama, 2), tmp_path)
    copy = tiny_base("llama")
    output = Fingerprint.parse(copy.info.fingerprint).output
    quantised = str(Fingerprint("of integers", output, quantised=True))
    copy.info = replace(copy.info, quantized=True, fingerprint=quantised)
    load_heads(tmp_path, copy)
    assert "trained on a full-precision copy" in capsys.readouterr().err
    with_fingerprint(tmp_path, str(Fingerprint("of integers", "another", quantised=True)))
    with pytest.raises(IncompatibleBaseError, match="fingerprint"):
        load_heads(tmp_path, copy)


def test_a_model_in_a_folder_keeps_its_fingerprint(tmp_path: Path, chat_base: BaseModel) -> None:
    for part in (chat_base.model, chat_base.tokenizer):
        part.save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):
        loaded = load_base_model(str(tmp_path), dtype=dtype, device="cpu")
        assert loaded.info.fingerprint == chat_base.info.fingerprint

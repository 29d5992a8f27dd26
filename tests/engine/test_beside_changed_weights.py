"""What goes with a model follows it when its weights change: heads, a draft model, its fingerprint,
its precision. A file that it was read from is no part of it.
"""

from pathlib import Path

import pytest
import torch
from support.models.changes import PROMPT, TOKENS, answer, change, expected, made, plain
from support.small_engines import build_engine, random_heads

import medusa_kit
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import wrap_model
from medusa_kit.errors import ConfigError, IncompatibleBaseError
from medusa_kit.heads import load_heads, save_heads
from medusa_kit.infer.cpu.binding import kernels

needs_cpp = pytest.mark.skipif(kernels.load_library() is None, reason="no compiler")


def test_heads_take_the_dtype_that_the_model_was_given() -> None:
    base, other = wrap_model(made("llama-tied"), None, "tiny"), made("llama-tied")
    engine = build_engine(base, heads=random_heads(base))
    for dtype in (torch.float64, torch.float32):
        for model in (base.model, other):
            model.to(dtype)
        for options in ({}, {"drafter": "auto"}):
            result = engine.generate(PROMPT, max_new_tokens=TOKENS, **options)
            assert result.token_ids == plain(other)
        assert engine.heads is not None
        assert {one.dtype for one in engine.heads.parameters()} == {dtype}
        engine.heads.half()  # and back, where somebody rounds them alone


@needs_cpp
def test_heads_follow_their_base_and_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed heads guess with the rows of the base and with the numbers that are there now."""
    base = wrap_model(made("llama-tied"), None, "tiny")
    ids = torch.arange(0, 96, 2)
    heads = random_heads(base, projection="reduced", reduced_ids=ids)
    engine = build_engine(base, heads=heads)
    hidden = torch.randn(3, base.info.hidden_size, generator=torch.Generator().manual_seed(0))

    def by_torch() -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(heads, "guesser", None)
            return heads.candidates(hidden, 1)

    for edit in (
        lambda: base.model.get_output_embeddings().weight.data.mul_(-1),
        lambda: heads.blocks[0][0].linear.weight.data.mul_(-9),
    ):
        before = heads.candidates(hidden, 1)
        edit()
        assert engine.generate(PROMPT, max_new_tokens=TOKENS).token_ids == plain(base.model)
        assert torch.equal(heads.candidates(hidden, 1), by_torch())
        assert not torch.equal(heads.candidates(hidden, 1), before)


def test_a_draft_model_that_was_changed_drafts_as_it_is() -> None:
    """It is the base's twin until it is changed; drafts of a twin are all right."""
    base, draft = (wrap_model(made("llama-tied"), None, name) for name in ("base", "draft"))
    engine = build_engine(base, draft_model=draft)

    def accepted() -> float:
        result = engine.generate(PROMPT, max_new_tokens=12, drafter="draft-model")
        assert result.token_ids == expected("llama-tied", (), 12)
        return float(result.stats.acceptance_length)

    whole = accepted()
    change(draft.model, "by data")
    change(draft.model, "output")
    assert accepted() < whole
    draft.model.load_state_dict(base.model.state_dict())
    assert accepted() == whole


def test_fingerprint_and_remembered_checks_are_of_what_is_there(tmp_path: Path) -> None:
    made("llama-tied").save_pretrained(tmp_path / "model")
    base = load_base_model(str(tmp_path / "model"), device="cpu")
    assert base.checks_are_remembered
    save_heads(random_heads(base), tmp_path / "heads")
    before = base.info.fingerprint
    change(base.model, "one row")
    engine = build_engine(base)
    assert base.info.fingerprint == base.fingerprint() != before
    assert not base.checks_are_remembered
    assert not engine.check.remembered
    with pytest.raises(IncompatibleBaseError):
        load_heads(tmp_path / "heads", base)


@pytest.mark.parametrize("family", ["gpt2", "llama-tied"])
def test_a_checkpoint_that_is_overwritten_stays_loaded(tmp_path: Path, family: str) -> None:
    """`cp` writes into the file that is there, and transformers maps what need not be converted."""
    made(family).save_pretrained(tmp_path)
    base = load_base_model(str(tmp_path), device="cpu")
    assert base.info.tied_embeddings
    engine = build_engine(base)
    before = engine.generate(PROMPT, max_new_tokens=TOKENS, drafter="none").token_ids
    with (tmp_path / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(bytes(range(1, 101)) * (size // 200))
    assert engine.generate(PROMPT, max_new_tokens=TOKENS, drafter="none").token_ids == before
    assert plain(base.model) == before == plain(made(family))


def test_a_precision_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    library = kernels.load_library()
    if library is None or not kernels.has_integers(library):
        pytest.skip("no kernels that multiply integers")
    made("llama-tied").save_pretrained(tmp_path)
    engine = medusa_kit.load(str(tmp_path), heads=None, weights="int8", activations="int8",
                             device="cpu")  # fmt: skip
    answer(engine)
    change(engine.base.model, "norm")
    with pytest.raises(ConfigError, match="the model was changed"):
        answer(engine)

"""A draft model of another tokenizer: common tokens, and text converted between the two.

The pair for decoding is the same model twice with its tokens in another order: if tokens are mapped
rightly, drafts are accepted in full.
"""

import random
from typing import Any

import pytest
import torch
from support.small_engines import build_engine, endless_base, random_prompt
from support.tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from medusa_kit.base.gguf import byte_tokenizer
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.drafters.draft_model.retokenized import LONGEST_TAIL, Retokenized
from medusa_kit.drafters.draft_model.shared_vocabulary import (
    measure_overlap,
    shared_vocabulary,
    surfaces,
)
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ConfigError

VOCAB = 96
TEXT = "the cat sat on the mat and the hat sat on the cat, then the rat ran at the man. " * 20


def words(names: list[str]) -> Any:
    """A tokenizer of whole words; names[i] is token i."""
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, names[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def trained(byte_level: bool) -> Any:
    """A BPE tokenizer of some 300 tokens, spelt as GPT-2 spells or as sentencepiece does."""
    inner = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    special = ["<s>", "</s>"] if byte_level else ["<s>", "</s>", "<0x0A>"]
    if byte_level:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    inner.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet,
                                    special_tokens=special, show_progress=False)
    )  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def renumbered(missing: int = 0) -> tuple[BaseModel, BaseModel]:
    """(base, the same model with its tokens in another order, `missing` of them under names that
    the base does not know)."""
    base = endless_base(VOCAB)
    order = list(range(VOCAB))
    random.Random(3).shuffle(order)
    draft = tiny_model("llama", vocab_size=VOCAB)
    draft.generation_config.eos_token_id = None
    for embedding in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        embedding.weight.data = embedding.weight.data[torch.tensor(order)]
    names = [f"w{i}" for i in range(VOCAB)]
    others = [names[i] if place >= missing else f"x{i}" for place, i in enumerate(order)]
    base.tokenizer = words(names)
    return base, wrap_model(draft, words(others), "renumbered")


def answers(engine: Engine, drafter: str, **options: Any) -> Any:
    prompts = [random_prompt(length, length) for length in (70, 4, 17)]
    return engine.generate(
        prompts, max_new_tokens=31, drafter=drafter, drafter_options=options or None
    )


@pytest.mark.parametrize("tokenizer", ["auto", "text"])
def test_the_same_model_with_other_ids_is_accepted_whole(
    tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base, draft = renumbered()
    engine = build_engine(base)
    plain, engine.draft_model = answers(engine, "none"), draft
    options = {"tokenizer": tokenizer, "threshold": 0, "max_length": 5, "num_nodes": 6}
    results = answers(engine, "draft-model", **options)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert [r.stats.acceptance_length for r in results] == [6.0] * 3
    assert ("renumbered has 100.0% of" in capsys.readouterr().err) == (tokenizer == "auto")
    assert "(text tokenizer)" in results[0].stats.drafter_notes[0]


def test_tokens_that_the_draft_lacks_cost_guesses_only() -> None:
    base, draft = renumbered(missing=30)
    engine = build_engine(base)
    plain, engine.draft_model = answers(engine, "none"), draft
    results = answers(engine, "draft-model", threshold=0)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert 1.0 < max(r.stats.acceptance_length for r in results) < 5.0


def test_which_way_is_taken_and_what_is_refused() -> None:
    base, draft = renumbered()
    assert shared_vocabulary("auto", base, base).kind == "same"
    assert shared_vocabulary("auto", base, draft).kind == "text"
    with pytest.raises(ConfigError, match=r"'endless-96' and 'renumbered' are not the same"):
        shared_vocabulary("same", base, draft)
    strange = renumbered(VOCAB)[1]
    for wanted in ("auto", "text"):
        with pytest.raises(ConfigError, match=r"'endless-96' and 'renumbered' have no token"):
            shared_vocabulary(wanted, base, strange)
    with pytest.raises(ConfigError, match="96 and 8 tokens, and one has no tokenizer"):
        shared_vocabulary("auto", base, endless_base(8))
    engine = build_engine(base)
    engine.draft_model = draft
    with pytest.raises(ConfigError, match="tokenizer = 'intersection' is no longer there"):
        answers(engine, "draft-model", tokenizer="intersection")


@pytest.mark.parametrize("draft_size", [60, 130])
def test_the_same_ids_with_fewer_or_more_rows(draft_size: int) -> None:
    """Some families pad the output embedding by size; ids that one model lacks are no guesses."""
    engine = build_engine(endless_base(VOCAB))
    plain = answers(engine, "none")
    draft = tiny_model("llama", vocab_size=draft_size)
    base = engine.base.model
    rows = min(VOCAB, draft_size)
    draft.load_state_dict(
        {k: v for k, v in base.state_dict().items() if "layers" in k}, strict=False
    )
    for of in ("get_input_embeddings", "get_output_embeddings"):
        getattr(draft, of)().weight.data[:rows] = getattr(base, of)().weight.data[:rows]
    for model, size in ((engine.base, VOCAB), (draft, draft_size)):
        tokenizer = words([f"w{i}" for i in range(min(size, VOCAB))])
        if model is draft:
            draft = wrap_model(draft, tokenizer, "sized")
        else:
            engine.base.tokenizer = tokenizer
    engine.draft_model = draft
    kind = "same" if draft_size > VOCAB else "text"
    results = answers(engine, "draft-model", tokenizer=kind, threshold=0)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert max(r.stats.acceptance_length for r in results) > (2.0 if kind == "same" else 1.1)


def test_spellings_of_one_text_are_one_token() -> None:
    ours, theirs = surfaces(trained(byte_level=True)), surfaces(trained(byte_level=False))
    assert b" the" in ours
    assert b" the" in theirs
    assert b"\n" in ours
    assert "<s>" in ours
    assert b"<s>" not in theirs
    overlap = measure_overlap(trained(True), trained(False), 300, 300)
    assert 0.05 < overlap.share < 0.9
    assert not overlap.agrees
    assert measure_overlap(trained(True), trained(True), 300, 300).agrees
    assert max(measure_overlap(trained(True), trained(False), 40, 50).base_ids) < 40


@pytest.mark.parametrize("base", [trained(True), byte_tokenizer()], ids=["bpe", "bytes"])
@pytest.mark.parametrize("draft", [trained(True), trained(False)], ids=["ours", "theirs"])
def test_text_is_followed_as_it_grows_and_when_it_changes(base: Any, draft: Any) -> None:
    tokens = base.encode(TEXT[:700], add_special_tokens=False)
    reader, draw = Retokenized(base, draft, len(base), len(draft)), random.Random(0)
    length = 3
    while length < len(tokens):
        ids = reader.read(tokens[:length])
        text = base.decode(tokens[:length], clean_up_tokenization_spaces=False)
        assert ids == draft.encode(text, add_special_tokens=False)
        length += draw.randrange(1, 9)
    assert reader._from > len(tokens) - 2 * LONGEST_TAIL - 16, "most of the text is settled"
    other = base.encode("a mat sat on the cat", add_special_tokens=False)
    ids = reader.read(other)
    assert ids == draft.encode("a mat sat on the cat", add_special_tokens=False)
    said = draft.encode(" and the rat", add_special_tokens=False)
    chain = reader.back(other, said, ids)
    assert base.decode([*other, *chain]) == "a mat sat on the cat and the rat"
    assert reader.back(other, [], ids) == []

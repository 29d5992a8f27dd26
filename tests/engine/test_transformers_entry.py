"""generate() with custom_generate answers as generate() without it, or says what it cannot do."""

import copy
import gc
import weakref
from typing import Any, get_type_hints

import pytest
import torch
from support.small_engines import BUSHY, random_heads, random_prompt
from support.tiny_models import CONTEXT, tiny_base, tiny_model
from transformers import LogitsProcessor, MaxTimeCriteria, RepetitionPenaltyLogitsProcessor
from transformers.generation.streamers import BaseStreamer

import medusa_kit
from medusa_kit.engine import transformers_entry
from medusa_kit.errors import ConfigError, ContextLengthError

LENGTHS = (5, 19, 11)
recycling = medusa_kit.custom_generate_with(drafter="recycling", options={"num_nodes": 7})


def padded(lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    """Prompts of different length, padded on the left."""
    T = max(lengths)
    ids = [[0] * (T - n) + random_prompt(n, n) for n in lengths]
    mask = [[0] * (T - n) + [1] * n for n in lengths]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "gemma3", "gptj"])
def test_answers_are_those_of_plain_generate(family: str) -> None:
    """A padded batch and one prompt, by several drafters; the model answers plainly as before."""
    model, attention = tiny_model(family), tiny_model(family).config._attn_implementation
    heads = random_heads(tiny_base(family))
    by_heads = medusa_kit.custom_generate_with(heads=heads, tree=BUSHY)
    for inputs in (padded(), padded((7,))):
        expected = model.generate(**inputs, max_new_tokens=24)
        for entry in (medusa_kit.custom_generate, recycling, by_heads):
            answer = model.generate(**inputs, max_new_tokens=24, custom_generate=entry)
            assert torch.equal(answer, expected)
        assert torch.equal(model.generate(**inputs, max_new_tokens=24), expected)
    assert model.config._attn_implementation == attention
    assert all(parameter.requires_grad for parameter in model.parameters())


COUNTS_PADDING = get_type_hints(RepetitionPenaltyLogitsProcessor.__init__)[
    "prompt_ignore_length"
] == (int | None)
PROCESSED = [
    pytest.param(
        {"repetition_penalty": 1.5},
        marks=pytest.mark.skipif(
            COUNTS_PADDING, reason="this transformers penalises the padding's token too"
        ),
    ),
    {"no_repeat_ngram_size": 2, "suppress_tokens": [7, 8]},
    {"min_new_tokens": 12, "bad_words_ids": [[5], [9, 11]]},
    {"min_length": 26, "forced_eos_token_id": 2},
]


@pytest.mark.parametrize("settings", PROCESSED, ids=lambda settings: next(iter(settings)))
def test_settings_that_process_logits_hold(llama: Any, settings: dict[str, Any]) -> None:
    arguments = {**padded(), "max_new_tokens": 16, **settings}
    expected = llama.generate(**arguments)
    assert torch.equal(llama.generate(**arguments, custom_generate=recycling), expected)
    assert not torch.equal(expected, llama.generate(**padded(), max_new_tokens=16))


def test_lengths_and_stop_tokens_are_the_calls(llama: Any) -> None:
    inputs = padded()
    free = llama.generate(**inputs, max_new_tokens=20)
    stop = int(free[0, max(LENGTHS) + 4])
    for settings in ({"eos_token_id": [stop, 3]}, {"eos_token_id": stop, "pad_token_id": 50},
                     {"max_length": 30}):  # fmt: skip
        settings = {"max_new_tokens": 20, **settings} if "max_length" not in settings else settings
        expected = llama.generate(**inputs, **settings)
        answer = llama.generate(**inputs, **settings, custom_generate=recycling)
        assert torch.equal(answer, expected)
        assert answer.shape != free.shape or not torch.equal(answer, free)


def test_sampling_is_governed_by_torchs_seed(llama: Any) -> None:
    settings = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01,
                "max_new_tokens": 16, "num_return_sequences": 3}  # fmt: skip
    answers = []
    for seed, entry in ((1, recycling), (1, medusa_kit.custom_generate), (2, recycling)):
        torch.manual_seed(seed)
        answers.append(llama.generate(**padded((6,)), **settings, custom_generate=entry))
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])
    assert len({tuple(row) for row in answers[0].tolist()}) == 3
    only_the_likeliest = {**settings, "top_k": 1}
    answer = llama.generate(**padded((6,)), **only_the_likeliest, custom_generate=recycling)
    expected = llama.generate(**padded((6,)), max_new_tokens=16)
    assert torch.equal(answer, expected.expand(3, -1))


class Listening(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_token_streamer_hears_what_a_streamer_of_plain_generate_hears(llama: Any) -> None:
    own, ours, arguments = Listening(), Listening(), {**padded((6,)), "max_new_tokens": 12}
    llama.generate(**arguments, streamer=own)
    llama.generate(**arguments, token_streamer=ours, custom_generate=recycling)
    assert ours.heard == own.heard
    assert ours.ended


def test_what_generate_does_not_pass_on_changes_no_token(llama: Any) -> None:
    """transformers keeps a streamer and an assistant model from a callable; where it does not, they
    are refused by name."""
    arguments = {**padded((6,)), "max_new_tokens": 12}
    kept: dict[str, Any] = {"streamer": Listening(), "assistant_model": tiny_model("llama")}
    answer = llama.generate(**arguments, **kept, custom_generate=recycling)
    assert torch.equal(answer, llama.generate(**arguments))
    assert kept["streamer"].heard == arguments["input_ids"].tolist()  # by generate() itself

    def passes_them_on(*given: Any, **keywords: Any) -> Any:
        return recycling(*given, **keywords, **{name: kept[name]})

    for name in kept:
        with pytest.raises(ConfigError, match=f"cannot honour {name}"):
            llama.generate(**arguments, custom_generate=passes_them_on)


class Own(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


REFUSED = [
    ({"num_beams": 2}, "num_beams=2; expected 1"),
    ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
    ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
    ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    ({"max_time": 1.0}, "max_time=1.0"),
    ({"use_cache": False}, "use_cache=False"),
    ({"cache_implementation": "static"}, "cache_implementation='static'"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
    ({"logits_processor": [Own()]}, "logits processor Own"),
    ({"prefix_allowed_tokens_fn": lambda row, ids: [5]}, "PrefixConstrainedLogitsProcessor"),
    ({"stopping_criteria": [MaxTimeCriteria(9.0)]}, "stopping criterion MaxTimeCriteria"),
    ({"token_streamer": Listening()}, "a token_streamer was given with 3 prompts"),
]


@pytest.mark.parametrize(("asked", "named"), REFUSED, ids=lambda one: next(iter(one)))
def test_what_cannot_be_honoured_is_refused_by_name(
    llama: Any, asked: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named.replace("'", ".")):
        llama.generate(
            **padded(), max_new_tokens=4, **asked, custom_generate=medusa_kit.custom_generate
        )


def test_refusals_that_need_more_than_a_setting(llama: Any) -> None:
    inputs, entry = padded(), {"max_new_tokens": 4, "custom_generate": medusa_kit.custom_generate}
    with pytest.raises(ConfigError, match="inputs_embeds"):
        llama.generate(inputs_embeds=llama.model.embed_tokens(inputs["input_ids"]), **entry)
    cache = llama(inputs["input_ids"][:, :3], use_cache=True).past_key_values
    with pytest.raises(ConfigError, match="past_key_values with 3 tokens"):
        llama.generate(**inputs, past_key_values=cache, **entry)
    with pytest.raises(ConfigError, match="position_ids"):
        llama.generate(**inputs, position_ids=torch.arange(19).expand(3, 19) + 1, **entry)
    with pytest.raises(ConfigError, match="no prompts"):
        llama.generate(inputs["input_ids"][:0], **entry)
    with pytest.raises(ConfigError, match=r"prompt 0 hides .* on the left only"):
        llama.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"].flip(1), **entry
        )
    with pytest.raises(ContextLengthError, match=f"holds {CONTEXT}"):
        llama.generate(**inputs, **{**entry, "max_new_tokens": CONTEXT})
    with pytest.raises(ConfigError, match="'prompt_lookup' is unknown"):
        medusa_kit.custom_generate_with(drafter="prompt_lookup")
    llama.train()
    with pytest.raises(ConfigError, match="training mode"):
        llama.generate(**inputs, **entry)
    llama.eval()


def test_engines_are_built_once_follow_the_weights_and_go_with_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[Any] = []
    real = transformers_entry._built
    monkeypatch.setattr(
        transformers_entry, "_built", lambda model: built.append(type(model)) or real(model)
    )
    model, arguments = tiny_model("llama-tied"), {**padded(), "max_new_tokens": 12}
    for entry in (recycling, medusa_kit.custom_generate, recycling):
        before = model.generate(**arguments, custom_generate=entry)
    assert len(built) == 1
    other = copy.deepcopy(model)  # builds its own
    assert torch.equal(other.generate(**arguments, custom_generate=recycling), before)
    assert len(built) == 2
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.neg_()
    after = model.generate(**arguments, custom_generate=recycling)
    assert len(built) == 3
    assert torch.equal(after, model.generate(**arguments))
    assert not torch.equal(after, before)
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None

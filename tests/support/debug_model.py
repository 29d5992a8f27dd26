"""What tests of chats share: the debug model and what it answers by itself; templates that do with
earlier turns what real ones do, and small tokenizers for them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_kit.base.gguf import CHATML_TEMPLATE
from medusa_kit.base.loading import load_base_model

ROOT = Path(__file__).parents[2]
MODEL = ["--model", "debug-tiny", "--device", "cpu"]
PLAIN = [*MODEL, "--heads", "none", "-n", "8"]

FOR_ALL = "{% for m in messages %}"
HEADER = "{{ '<|im_start|>' + m['role'] + '\n' }}"
ASK = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + CHATML_TEMPLATE
)
STRIPPING = FOR_ALL + HEADER + "{{ m['content'] | trim + '<|im_end|>\n' }}" + ASK
TEMPLATES = {  # which leave earlier turns as they are
    "chatml": CHATML_TEMPLATE,
    "system message by default": (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe ab.<|im_end|>\n' }}"
        "{% endif %}" + CHATML_TEMPLATE
    ),
    "text begun once": "{{ '<s>' }}" + CHATML_TEMPLATE,
    "text ended once": CHATML_TEMPLATE + "{% if not add_generation_prompt %}</s>{% endif %}",
    "no system role": NO_SYSTEM,
    "numbered turns": FOR_ALL + "{{ '<|im_start|>' ~ loop.index0 ~ m['role'] + '\n' }}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' ~ messages | length ~ 'assistant\n' }}"
    "{% endif %}",
    "stripping": STRIPPING,
    "no special token": FOR_ALL + "{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    # spaces around what is said, and each turn begins a text, as Llama 2's
    "spaced": FOR_ALL + "{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' </s>' }}{% endif %}{% endfor %}",
}  # fmt: skip
FORGETFUL = (  # as of models that think: only the last answer keeps its thoughts
    FOR_ALL + HEADER + "{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}"
    "{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}{{ '<|im_end|>\n' }}" + ASK
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SPACE = "▁"
TOKENIZERS = ("bytes", "a space first", "a space after special tokens")


def plain_answer(messages: list[dict[str, str]], tokens: int = 8) -> str:
    """What the model answers by transformers' own generate."""
    base = load_base_model("debug-tiny", device="cpu")
    ids = base.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    ids_1T = torch.tensor([ids])
    out_1T = base.model.generate(
        ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=tokens, do_sample=False
    )
    return base.tokenizer.decode(out_1T[0, len(ids) :], skip_special_tokens=True)


def plain_text(prompt: str) -> str:
    return plain_answer([{"role": "user", "content": prompt}])


def small_tokenizer(template: str, kind: str = "bytes") -> Any:
    """A token a byte or ASCII character, and the token `ab`: a model may write `a` and `b`, which
    nobody encodes so. Those of SentencePiece's kind put a space before text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind != "bytes":
        letters = [SPACE, "\n", *map(chr, range(32, 127))]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *letters, "ab"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    if kind == "bytes":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
    elif kind == "a space first":
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        inner.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    else:
        inner.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
        inner.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>",
        additional_special_tokens=SPECIAL[2:], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer

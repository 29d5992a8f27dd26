"""The forms in which each verified family's published chat templates write calls and thoughts."""

from typing import NamedTuple

from support.text import argument_templates, calling_templates, thinking_templates


class Forms(NamedTuple):
    """`calls`, `thoughts`: names in the support tables; None: no template of its models shows any,
    or its form is not read, so that Hermes' is asked for (`unread`: such a template)."""

    calls: str | None = None
    thoughts: str | None = None
    unread: str | None = None


CALLING = {name: family.template for name, family in calling_templates.FORMS.items()} | {
    name: family.template for name, family in argument_templates.ENTRIES.items()
}
UNREAD = calling_templates.OTHERS | argument_templates.OTHERS
THINKING = thinking_templates.FAMILIES
NOTHING, QWEN = Forms(), Forms("hermes", "qwen3")
CODER = Forms("qwen coder", "qwen3_5")
FAMILY_FORMS = {
    **dict.fromkeys(
        ("arcee", "bamba", "codegen", "deepseek_v2", "falcon", "gemma", "gemma2", "gemma3_text",
         "gemma3n_text", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite", "granitemoe",
         "helium", "mamba2", "minimax", "nemotron", "olmo", "olmo2", "olmoe", "opt", "persimmon",
         "phi", "phi3", "phimoe", "qwen2_moe", "stablelm", "starcoder2", "zamba2"),
        NOTHING,
    ),
    **dict.fromkeys(("exaone4", "granitemoehybrid", "qwen3", "qwen3_moe", "qwen3_next"), QWEN),
    **dict.fromkeys(("nemotron_h", "qwen3_5_moe_text", "qwen3_5_text"), CODER),
    **dict.fromkeys(("lfm2", "lfm2_moe"), Forms(None, "qwen3", "python")),
    **dict.fromkeys(("olmo3", "olmo_hybrid"), Forms(None, "qwen3_5")),
    **dict.fromkeys(("mistral", "mixtral"), Forms("mistral", "mistral")),
    "apertus": Forms("apertus", "apertus"),
    "cohere": Forms(None, None, "lines"),
    "cohere2": Forms("cohere", "cohere2"),
    "deepseek_v3": Forms("deepseek", "deepseek_v3"),
    "deepseek_v32": Forms("deepseek 3.2", "deepseek_v3"),
    "ernie4_5": Forms(None, "qwen3"),
    "falcon_h1": Forms("hermes"),
    "gemma4_text": Forms(None, "gemma4_text", "gemma"),
    "glm4_moe": Forms("glm", "glm4_moe"),
    "glm_moe_dsa": Forms("glm 4.7", "glm4_moe"),
    "gpt_oss": Forms("channels", "gpt_oss"),
    "kimi_linear": Forms("kimi"),
    "llama": Forms("llama"),
    "llama4_text": Forms("llama"),
    "minimax_m2": Forms("minimax", "qwen3_5"),
    "qwen2": Forms("hermes", "qwen3"),
    "seed_oss": Forms("seed", "seed_oss"),
    "smollm3": Forms(None, "smollm3", "mention"),
}  # fmt: skip
CALLING["channels"] = thinking_templates.HARMONY

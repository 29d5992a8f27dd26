"""Chat templates of the kinds that models with thoughts have, cut down to what they write around
thoughts, and what such a model writes behind its prompt."""

from typing import NamedTuple

ASK = "{% if add_generation_prompt %}"


class Family(NamedTuple):
    """`template`; what the model `writes`; `way`: how the template takes thoughts back, where it
    shows them. `prompt_end`: of what it is asked with, where that matters."""

    template: str
    writes: str
    way: str | None = "reasoning_content"
    added: tuple[str, ...] = ()  # special tokens besides


def chatml(thought: str, ask: str = "", split: str = "") -> str:
    content = f"m.content.split('{split}')[-1]" if split else "m.content"
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + thought
        + "{{ " + content + " }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        + ASK + "<|im_start|>assistant\n" + ask + "{% endif %}"
    )  # fmt: skip


def shown(opening: str, closing: str, otherwise: str = "", key: str = "reasoning_content") -> str:
    return (
        "{% if m." + key + " %}" + opening + "{{ m." + key + " }}" + closing + "{% else %}"
        + otherwise + "{% endif %}"
    )  # fmt: skip


HARMONY = (
    "{% for m in messages %}{% set last = loop.last %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and (m.tool_calls or last) %}"
    "{% if m.content and m.tool_calls %}{{ raise_exception('both') }}{% endif %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}"
    "<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if last else '<|end|>' }}{% endfor %}{% elif m.role == 'tool' %}"
    "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    + ASK + "<|start|>assistant{% endif %}"
)  # fmt: skip
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
GEMMA = (
    "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning_content and m.tool_calls %}"
    "<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{% endif %}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{}<tool_call|>"
    "{% endfor %}{{ m.content }}<turn|>\n{% endfor %}" + ASK + "<|turn>model\n"
    "{% if not enable_thinking | default(true) %}<|channel>thought\n<channel|>{% endif %}"
    "{% endif %}"
)
APERTUS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant_start|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content.blocks %}"
    "{% if b.type == 'thoughts' %}<|inner_prefix|>{{ b.text }}<|inner_suffix|>"
    "{% else %}{{ b.text }}{% endif %}{% endfor %}{% endif %}<|assistant_end|>"
    "{% else %}<|user_start|>{{ m.content }}<|user_end|>{% endif %}{% endfor %}"
    + ASK + "<|assistant_start|>{% endif %}"
)  # fmt: skip
MINISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.content is string %}{{ m.content }}</s>{% else %}{% for b in m.content %}"
    "{% if b.type == 'text' %}{{ b.text }}{% elif b.type == 'thinking' %}"
    "[THINK]{{ b.thinking }}[/THINK]{% else %}{{ raise_exception('parts') }}{% endif %}{% endfor %}"
    "</s>{% endif %}{% endfor %}"
)
SOLAR = (
    "{% for m in messages %}{% if m.reasoning %}<|begin|>assistant<|think|>{{ m.reasoning }}<|end|>"
    "{% endif %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endfor %}"
    + ASK + "<|begin|>assistant{% endif %}"
)  # fmt: skip
APRIEL = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|begin_assistant|>\n"
    + shown("", "\n[BEGIN FINAL RESPONSE]\n") + "{{ m.content }}<|end|>{% else %}"
    "<|begin_user|>\n{{ m.content }}\n{% endif %}{% endfor %}"
    + ASK + "<|begin_assistant|>\nHere are my reasoning steps:\n{% endif %}"
)  # fmt: skip
APRIEL_TOLD = "Write [BEGIN FINAL RESPONSE] ... [END FINAL RESPONSE].\n" + chatml("")
COHERE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|BOT|>"
    + shown("<|START_THINKING|>", "<|END_THINKING|>")
    + "{% if m.tool_calls %}<|START_ACTION|>[{{ m.tool_calls[0].function.name }}]<|END_ACTION|>"
    "{% else %}<|START_TEXT|>{{ m.content }}<|END_TEXT|>{% endif %}<|EOT|>"
    "{% else %}<|USER|>{{ m.content }}<|EOT|>{% endif %}{% endfor %}"
    + ASK + "<|BOT|><|START_THINKING|>{% endif %}"
)  # fmt: skip

THINK = shown("<think>\n", "\n</think>\n\n", "<think>\n\n</think>\n\n")
TAGGED = "<think>\nLet me see.\n</think>\n\nIt is."
GOES_ON = "Let me see.\n</think>\n\nIt is."
FAMILIES = {
    # Qwen 3 and its like: SmolLM 3, EXAONE 4, LFM 2.5, Granite 4, Ernie 4.5
    "qwen3": Family(chatml(THINK), TAGGED),
    "qwen3_5": Family(chatml(THINK, "<think>\n"), GOES_ON),  # Nemotron H, MiniMax M2, OLMo 3
    "deepseek_v3": Family(chatml("", "<think>\n", "</think>"), GOES_ON, None),
    "smollm3": Family("Write <think> Thought </think> Solution." + chatml(""), TAGGED, None),
    "glm4_moe": Family(chatml(shown("<think>", "</think>", "</think>"), "<think>"), GOES_ON),
    "seed_oss": Family(
        chatml(shown("<seed:think>", "</seed:think>\n")),
        "<seed:think>Let me see.</seed:think>\nIt is.",
    ),
    "gpt_oss": Family(
        HARMONY,
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final"
        "<|message|>It is.",
        "thinking",
        HARMONY_TOKENS,
    ),
    "gpt_oss, by its tokens": Family(
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        + ASK
        + "<|start|>assistant{% endif %}",
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final"
        "<|message|>It is.",
        None,
        HARMONY_TOKENS,
    ),
    "gemma4_text": Family(
        GEMMA,
        "<|channel>thought\nLet me see.\n<channel|>It is.",
        added=("<|turn>", "<turn|>", "<|channel>", "<channel|>"),
    ),
    "apertus": Family(
        APERTUS,
        "<|inner_prefix|>Let me see.<|inner_suffix|>It is.",
        "blocks",
        ("<|inner_prefix|>", "<|inner_suffix|>", "<|assistant_end|>"),
    ),
    "mistral": Family(
        MINISTRAL, "[THINK]Let me see.[/THINK]It is.", "parts", ("[THINK]", "[/THINK]")
    ),
    "kimi_vl": Family(
        chatml("").replace("<|im_start|>", "<|im_middle|>"),
        "◁think▷Let me see.◁/think▷It is.",
        None,
    ),
    "minimax_m3": Family(
        chatml(shown("<mm:think>", "</mm:think>", "</mm:think>")),
        "<mm:think>Let me see.</mm:think>It is.",
    ),
    "apriel": Family(APRIEL, "Let me see.\n[BEGIN FINAL RESPONSE]\nIt is."),
    "apriel 1.5": Family(
        APRIEL_TOLD,
        "Here are my reasoning steps:\nLet me see.\n[BEGIN FINAL RESPONSE]\nIt is.\n"
        "[END FINAL RESPONSE]\n",
        None,
    ),
    "cohere2": Family(
        COHERE,
        "Let me see.<|END_THINKING|><|START_TEXT|>It is.",
        added=("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "kimi_k3": Family(
        "{% for m in messages %}<|open|>{{ m.role }}<|sep|>{% if m.role == 'assistant' %}"
        "<|open|>think<|sep|>{{ m.reasoning_content }}<|close|>think<|sep|>"
        "<|open|>response<|sep|>{% endif %}{{ m.content }}<|end|>{% endfor %}"
        + ASK
        + "<|open|>assistant<|sep|>{% if enable_thinking | default(true) %}"
        "<|open|>think<|sep|>{% else %}<|open|>response<|sep|>{% endif %}{% endif %}",
        "Let me see.<|close|>think<|sep|><|open|>response<|sep|>It is.",
        added=("<|open|>", "<|sep|>", "<|close|>", "<|end|>"),
    ),
    "solar": Family(
        SOLAR,
        "<|think|>Let me see.<|end|><|begin|>assistant<|content|>It is.",
        "reasoning",
        ("<|begin|>", "<|think|>", "<|content|>", "<|end|>"),
    ),
}

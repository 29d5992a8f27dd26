"""Chat templates of the kinds that models with tools have, cut down to how they write calls."""

from typing import NamedTuple

ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SHOWN = "{% if tools %}[TOOLS {{ tools | tojson }}] {% endif %}"
NINE = "{% if c.id is not string or c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'


class Calling(NamedTuple):
    """`template`; how it writes a call of `f` with `{}`, and a further one; the marks in it."""

    template: str
    writes: str
    further: str | None
    marks: tuple[str, ...] = ()


def turns(call: str, opening: str = "", between: str = "", closing: str = "", end: str = "") -> str:
    """`call`: of `c`, which is `loop.index0` of the message's. `end`: of a turn with calls."""
    return (
        SHOWN + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        + "{% if m.tool_calls %}" + said(opening) + "{% for c in m.tool_calls %}" + call
        + "{% if not loop.last %}" + said(between) + "{% endif %}{% endfor %}"
        + said(closing + (end or "<|im_end|>\n"))
        + "{% else %}<|im_end|>\n{% endif %}{% endfor %}" + ASK
    )  # fmt: skip


def said(text: str) -> str:
    """A text that Jinja leaves as it is, line breaks included."""
    return "{{ " + repr(text) + " }}"


def listed(opening: str, closing: str, call: str = JSON) -> str:
    return turns(call, opening + "[", ", ", "]" + closing)


HERMES = turns("<tool_call>\n" + JSON + "\n</tool_call>", between="\n")
MISTRAL = listed("[TOOL_CALLS]", "", JSON[:-1] + ', "id": "' + NINE + '{{ c.id }}"}')
MISTRAL_NEW = turns(
    "[TOOL_CALLS]{{ c.function.name }}" + NINE
    + "[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}"
)  # fmt: skip
LLAMA = turns(
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    + JSON.replace("arguments\":", "parameters\":"), end="<|eom_id|>"
)  # fmt: skip
DEEPSEEK = turns(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
    "{{ '' + c.function.arguments }}\n```<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>",
).replace(SHOWN, "")  # fmt: skip
DEEPSEEK_NEW = turns(
    "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}"
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>",
)  # fmt: skip
KIMI = turns(
    "<|tool_call_begin|>functions.{{ c.function.name }}:{{ loop.index0 }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>",
    "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>",
)  # fmt: skip
COHERE = turns(
    '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}",
    "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>",
)  # fmt: skip
APERTUS = listed(
    "<|tools_prefix|>", "<|tools_suffix|>",
    '{"{{ c.function.name }}": {{ c.function.arguments | tojson }}}',
)  # fmt: skip
SOLAR = turns(
    "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ c.function.name }}<|tool_call:args|>"
    "{{ c.function.arguments | tojson }}<|tool_call:end|>", "<|tool_calls|>", end="<|calls|>",
)  # fmt: skip
FUNCTIONARY = turns(
    "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>",
    end="<|eom_id|>",
)
FORMS = {
    "hermes": Calling(
        HERMES, '<tool_call>\n{"name": "f", "arguments": {}', '}\n</tool_call>\n<tool_call>\n',
        ("<tool_call>", "</tool_call>"),
    ),
    "mistral": Calling(
        MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}', ', "id": "', ("[TOOL_CALLS]",)
    ),
    "mistral small": Calling(
        MISTRAL_NEW, "[TOOL_CALLS]f[CALL_ID]", "[TOOL_CALLS]",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "llama": Calling(LLAMA, '{"name": "f", "parameters": {}', None, ("<|eom_id|>",)),
    "deepseek": Calling(
        DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}",
        "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
         "<｜tool▁calls▁end｜>"),
    ),
    "deepseek 3.1": Calling(
        DEEPSEEK_NEW, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
    ),
    "kimi": Calling(
        KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0",
        "<|tool_call_end|><|tool_call_begin|>functions.",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
         "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    "cohere": Calling(
        COHERE, '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {}',
        '},\n    {"tool_call_id": "1", ', ("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "apertus": Calling(
        APERTUS, '<|tools_prefix|>[{"f": {}', '}, {"', ("<|tools_prefix|>", "<|tools_suffix|>")
    ),
    "solar": Calling(SOLAR, "<|tool_calls|><|tool_call:begin|>", "<|tool_call:end|>"),
    "nemotron": Calling(
        listed("<TOOLCALL>", "</TOOLCALL>"), '<TOOLCALL>[{"name": "f", "arguments": {}', '}, {"'
    ),  # Granite 3, Phi 4, xLAM and Apriel have other tags around such a list
    "functionary": Calling(FUNCTIONARY, "<function=f>{}", "</function><function="),
}  # fmt: skip
# Which are not read: arguments that are no JSON object, or a call that no answer can hold.
OTHERS = {
    "none": SHOWN + "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "mention": HERMES.split("{% if m.tool_calls")[0] + "Write <tool_call>.{% endfor %}",
    "python": listed(
        "<|tool_call_start|>", "<|tool_call_end|>",
        "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}"
        "{% endfor %})",
    ),
    "gemma": turns(
        "<|tool_call>call:{{ c.function.name }}{"
        "{% if c.function.arguments is mapping %}{% for k, v in c.function.arguments.items() %}"
        '{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}{% else %}{{ c.function.arguments }}{% endif %}'
        "}<tool_call|>"
    ),
    "behind the end": turns("<|im_end|>\n<|im_start|>call\n" + JSON),
    "by id": turns("<|call|>{{ c.id }}<|args|>{{ c.function.arguments | tojson }}"),
    "lines": turns("<call>{{ c.function.name }}\n{{ c.function.arguments | tojson(indent=2) }}"),
    "no mark": turns("{{ c.function.name }}\n{{ c.function.arguments | tojson }}"),
    "refuses": "{{ raise_exception('never') }}",
}  # fmt: skip

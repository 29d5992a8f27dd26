"""Chat templates that write a call with one entry for each argument, cut down to how they do."""

from typing import NamedTuple

from support.text.calling_templates import turns

TOLD = "{{ v if v is string else v | tojson }}"
PYTHON = "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"


class Entries(NamedTuple):
    """`template`; how it writes a call of `f` with the text `a` for `x` and one of `ff` with the
    number 5, without what stands behind; the marks in it. `as_json`: whether it writes all but text
    as JSON."""

    template: str
    writes: str
    marks: tuple[str, ...] = ()
    as_json: bool = True


def entries(before: str, between: str, after: str, value: str = TOLD) -> str:
    each = "{% for k, v in c.function.arguments.items() %}"
    return each + before + "{{ k }}" + between + value + after + "{% endfor %}"


QWEN = turns(
    "<tool_call>\n<function={{ c.function.name }}>\n"
    + entries("<parameter=", ">\n", "\n</parameter>\n", PYTHON) + "</function>\n</tool_call>",
    between="\n",
)  # fmt: skip
SEED = turns(
    "<seed:tool_call>\n<function={{ c.function.name }}>\n"
    + entries("<parameter=", ">", "</parameter>\n", "{{ v }}") + "</function>\n</seed:tool_call>",
    between="\n",
)  # fmt: skip
GLM = turns(
    "<tool_call>{{ c.function.name }}\n"
    + entries("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n") + "</tool_call>",
    between="\n",
)  # fmt: skip
GLM_JOINED = turns(
    "<tool_call>{{ c.function.name }}"
    + entries("<arg_key>", "</arg_key><arg_value>", "</arg_value>") + "</tool_call>"
)  # fmt: skip
MINIMAX = turns(
    '<invoke name="{{ c.function.name }}">\n'
    + entries('<parameter name="', '">', "</parameter>\n") + "</invoke>\n",
    "<minimax:tool_call>\n", "", "</minimax:tool_call>",
)  # fmt: skip
DEEPSEEK = turns(
    '<｜DSML｜invoke name="{{ c.function.name }}">\n'
    + entries(
        '<｜DSML｜parameter name="', "\" string=\"{{ 'true' if v is string else 'false' }}\">",
        "</｜DSML｜parameter>\n",
    ) + "</｜DSML｜invoke>\n",
    "<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>",
)  # fmt: skip
HUNYUAN = turns(
    "<tool_call>{{ c.function.name }}<tool_sep>\n"
    + entries("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n") + "</tool_call>\n",
    "<tool_calls>\n", "", "</tool_calls>",
)  # fmt: skip
BY_TYPE = turns(
    '<call tool="{{ c.function.name }}" index="{{ loop.index }}">'
    "{% for k, v in c.function.arguments.items() %}"
    "{% set t = 'string' if v is string else 'boolean' if v is boolean else 'null' if v is none "
    "else 'number' if v is number else 'object' if v is mapping else 'array' %}"
    '<argument key="{{ k }}" type="{{ t }}">' + TOLD + "</argument>{% endfor %}</call>",
    "<tools>", "", "</tools>",
)  # fmt: skip
XML_MARKS = ("<tool_call>", "</tool_call>")
ARG_MARKS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
ENTRIES = {
    "qwen coder": Entries(
        QWEN, "<tool_call>\n<function=f>\n<parameter=x>\na\n</parameter>\n</function>\n</tool_call>"
        "\n<tool_call>\n<function=ff>\n<parameter=x>\n5\n", XML_MARKS, as_json=False,
    ),
    "seed": Entries(
        SEED, "<seed:tool_call>\n<function=f>\n<parameter=x>a</parameter>\n</function>\n"
        "</seed:tool_call>\n<seed:tool_call>\n<function=ff>\n<parameter=x>5<",
        ("<seed:tool_call>", "</seed:tool_call>"), as_json=False,
    ),
    "glm": Entries(
        GLM, "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>a</arg_value>\n</tool_call>\n"
        "<tool_call>ff\n<arg_key>x</arg_key>\n<arg_value>5<", (*XML_MARKS, *ARG_MARKS),
    ),
    "glm 4.7": Entries(
        GLM_JOINED,
        "<tool_call>f<arg_key>x</arg_key><arg_value>a</arg_value></tool_call>"
        "<tool_call>ff<arg_key>x</arg_key><arg_value>5<", (*XML_MARKS, *ARG_MARKS),
    ),
    "minimax": Entries(
        MINIMAX, '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">a</parameter>\n'
        '</invoke>\n<invoke name="ff">\n<parameter name="x">5<',
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "deepseek 3.2": Entries(
        DEEPSEEK, '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter '
        'name="x" string="true">a</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke '
        'name="ff">\n<｜DSML｜parameter name="x" string="false">5<', ("｜DSML｜",),
    ),
    "hunyuan": Entries(
        HUNYUAN, "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>x</arg_key>\n<arg_value>a"
        "</arg_value>\n</tool_call>\n<tool_call>ff<tool_sep>\n<arg_key>x</arg_key>\n<arg_value>5<",
        (*XML_MARKS, *ARG_MARKS, "<tool_calls>", "</tool_calls>", "<tool_sep>"),
    ),
    "by type": Entries(
        BY_TYPE, '<tools><call tool="f" index="1"><argument key="x" type="string">a</argument>'
        '</call><call tool="ff" index="2"><argument key="x" type="number">5<',
    ),
}  # fmt: skip
# Forms that are not read: values that are quoted, changed, nested or without an end.
OTHERS = {
    "python": turns(
        "{{ c.function.name }}(" + entries("", "=", ", ", "{{ v | tojson }}") + ")",
        "<|tool_call_start|>[", ", ", "]<|tool_call_end|>",
    ),
    "gemma": turns(
        "<|tool_call>call:{{ c.function.name }}{"
        + entries("", ":", ",", "{{ '<|\"|>' + v + '<|\"|>' if v is string else v }}")
        + "}<tool_call|>",
    ),
    "escaped": turns("<call>{{ c.function.name }}" + entries("<p>", "<v>", "</v>", "{{ v | e }}")
                     + "</call>"),
    "nested": turns(
        "<call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}>"
        "{% if v is mapping %}{% for a, b in v.items() %}<{{ a }}>{{ b }}</{{ a }}>{% endfor %}"
        "{% else %}{{ v }}{% endif %}</{{ k }}>{% endfor %}</call>"
    ),
    "without nulls": turns(
        "<call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
        "{% if v is not none %}<p={{ k }}>" + TOLD + "</p>{% endif %}{% endfor %}</call>"
    ),
    "without an end": turns("<call>{{ c.function.name }}\n" + entries("", ": ", "\n")),
    "of its own": turns(
        "<call>{{ c.function.name }}" + entries("<", ">", "</{{ k }}>") + "</call>"
    ),
}  # fmt: skip

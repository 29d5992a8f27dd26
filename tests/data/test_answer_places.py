"""Where an answer begins and ends, with templates of the kinds that models have."""

from typing import Any

import pytest
from support.text.marked_tokens import marked_tokenizer, trained_runs

from medusa_kit.data.chat import encode_conversation
from medusa_kit.data.rendered import Rendered
from medusa_kit.errors import DataError
from medusa_kit.train.data import prepare

Messages = list[dict[str, Any]]


def talk(*contents: str, first: str = "user") -> Messages:
    """Turns of the user and the assistant, in turn."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


ASK = "{% if add_generation_prompt %}{{ '<A>' }}{% endif %}"
EACH = "{% for m in messages %}"
TURN = "{{ '<U>' if m.role == 'user' else '<A>' }}"
PLAIN = EACH + TURN + "{{ m.content + '<E>\n' }}{% endfor %}" + ASK
# <|end|> ends turns, and what ends the text stands behind the last one
PHI_3 = (EACH + "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}"
         "{% endif %}")  # fmt: skip
# asks for a thought, and leaves thoughts out of all answers
R1 = ("{{ bos_token }}" + EACH + TURN + "{{ m.content.split('</think>')[-1] }}"
      "{% if m.role == 'assistant' %}<E>{% endif %}{% endfor %}"
      "{% if add_generation_prompt %}{{ '<A><think>\n' }}{% endif %}")  # fmt: skip
# asks for a thought, and writes an empty one before the last answer alone
QWEN_3 = (EACH + "{% if m.role == 'user' %}{{ '<U>' + m.content }}{% elif loop.last %}"
          "{{ '<A><think>\n\n</think>\n\n' + m.content + '<E>\n' }}{% else %}"
          "{{ '<A>' + m.content + '<E>\n' }}{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<A><think>\n' }}{% endif %}")  # fmt: skip
TRIMMING = EACH + TURN + "{{ (m.content | trim) + '<E>' }}{% endfor %}" + ASK
MERGING = ("{% set ns = namespace(last='') %}" + EACH + "{% if m.role != ns.last %}"
           "{{ '<E>' if ns.last == 'assistant' }}" + TURN + "{% else %}{{ '\n\n' }}{% endif %}"
           "{{ m.content }}{% set ns.last = m.role %}{% endfor %}"
           "{{ '<E>' if ns.last == 'assistant' }}" + ASK)  # fmt: skip
WORDS = (EACH + "{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")  # fmt: skip
NO_END = EACH + TURN + "{{ m.content }}{% endfor %}" + ASK
LAST_ENDS = EACH + TURN + "{{ m.content }}{{ '<E>' if loop.last }}{% endfor %}" + ASK
OTHERS_END = EACH + TURN + "{{ m.content }}{{ '<E>' if not loop.last }}{% endfor %}" + ASK
# ends the last turn otherwise than those before it
RETURNS = (EACH + "{{ '<S>' + m.role + '<M>' + m.content }}"
           "{{ '<R>' if loop.last and m.role == 'assistant' else '<E>' }}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<S>assistant' }}{% endif %}")  # fmt: skip
# tells of something before the last question, so that earlier text changes
MOVING = (EACH + "{{ '[now]' if m.role == 'user' and loop.index0 >= (messages | length) - 2 }}"
          + TURN + "{{ m.content + '<E>' }}{% endfor %}" + ASK)  # fmt: skip
ALWAYS_OPENS = EACH + TURN + "{{ m.content + '<E>' }}{% endfor %}<A>"
MARK, UNMARK = "{% generation %}", "{% endgeneration %}"


def marked(inside: str, outside: str = "") -> str:
    """The assistant's words within the template's marks."""
    return (EACH + TURN + "{% if m.role == 'assistant' %}" + MARK + inside + UNMARK + outside
            + "{% else %}{{ m.content + '<E>\n' }}{% endif %}{% endfor %}" + ASK)  # fmt: skip


TEMPLATES = {
    "plain": PLAIN, "phi 3": PHI_3, "r1": R1, "qwen 3": QWEN_3, "trimming": TRIMMING,
    "merging": MERGING, "words": WORDS, "no end": NO_END, "last ends": LAST_ENDS,
    "others end": OTHERS_END, "returns": RETURNS, "moving": MOVING, "always opens": ALWAYS_OPENS,
    "marks around the end": marked("{{ m.content + '<E>\n' }}"),
    "marks around the words": marked("{{ m.content }}", "{{ '<E>\n' }}"),
    "marks around the last": PLAIN.replace(
        "{{ m.content + '<E>\n' }}", "{% if loop.last and m.role == 'assistant' %}" + MARK
        + "{{ m.content + '<E>\n' }}" + UNMARK + "{% else %}{{ m.content + '<E>\n' }}{% endif %}"),
}  # fmt: skip
SPECIALS = ["<U>", "<A>", "<S>", "<M>", "<R>", "<think>", "</think>", "<tool>", "<|end|>",
            "<|user|>", "<|assistant|>"]  # fmt: skip
TWO = talk("q", "a", "r", "b")
ENDED = ["a<E>", "b<E>"]
TRAINED: dict[str, tuple[str, Messages, list[str]]] = {
    "phi 3, one turn": ("phi 3", TWO[:2], ["a<|end|>"]),
    "phi 3": ("phi 3", TWO, ["a<|end|>", "b<|end|>"]),
    "r1, one turn": ("r1", TWO[:2], ["a<E>"]),
    "r1": ("r1", TWO, ENDED),
    "r1, thoughts": ("r1", talk("q", "<think>hm</think>a", "r", "<think>so</think>b"), ENDED),
    "qwen 3, one turn": ("qwen 3", TWO[:2], ["\n\n</think>\n\na<E>"]),
    "qwen 3": ("qwen 3", TWO, ["a<E>", "\n\n</think>\n\nb<E>"]),
    "trimming": ("trimming", talk("q", " a \n", "r", "\n b"), ENDED),
    "merging": ("merging", [*talk("q"), *TWO, *talk("c", "s", "d", first="assistant")],
                ["a<E>", "b\n\nc<E>", "d<E>"]),
    "words": ("words", TWO, [" a\n", " b\n"]),
    "words, a special token": ("words", talk("q", "a<tool>b c"), [" a<tool>b c\n"]),
    "no end": ("no end", TWO, ["a", "b"]),
    "last ends": ("last ends", TWO, ["a", "b<E>"]),
    "others end": ("others end", TWO, ["a<E>", "b"]),
    "returns": ("returns", TWO, ["<M>a<E>", "<M>b<R>"]),
    "moving": ("moving", TWO, ENDED),
    "always opens": ("always opens", TWO, ENDED),
    "the assistant first": ("plain", talk("h", "q", "a", first="assistant"), ["h<E>", "a<E>"]),
    "the assistant alone": ("plain", talk("h", first="assistant"), ["h<E>"]),
    "words of the question": ("plain", talk("<A>yes<E>", "yes", "yes", "yes"), ["yes<E>"] * 2),
    "an empty answer": ("plain", talk("q", "", "r", "b"), ["<E>", "b<E>"]),
    "an answer of special tokens": ("plain", talk("q", "<A>", "r", "<tool>"),
                                    ["<A><E>", "<tool><E>"]),
    "an answer with its end": ("plain", talk("q", "a<E>", "r", "b"), ENDED),
    "an end in an answer": ("plain", talk("q", "a<E>b"), ["a<E>b<E>"]),
    "marks around the end": ("marks around the end", TWO, ENDED),
    "marks, an empty answer": ("marks around the words", talk("q", "", "r", "b"), ["<E>", "b<E>"]),
    "marks, a special token": ("marks around the words", talk("q", "x<tool>", "r", "b"),
                               ["x<tool><E>", "b<E>"]),
    "marks, the assistant first": ("marks around the words", talk("A", "q", "b", first="assistant"),
                                   ["A<E>", "b<E>"]),
    "marks around the last": ("marks around the last", TWO, ["b<E>"]),
    "weight 0": ("plain", [TWO[0], {**TWO[1], "weight": 0}, *TWO[2:]], ["b<E>"]),
    "marks, weight 0": ("marks around the end", [*TWO[:3], {**TWO[3], "weight": 0}], ["a<E>"]),
}  # fmt: skip


def tokenizer_of(template: str) -> Any:
    eos = "<|endoftext|>" if template == "phi 3" else "<E>"
    merges = [("Ċ", "Ċ"), ("Ġ", "a"), ("Ġ", "b")]
    return marked_tokenizer(TEMPLATES[template], SPECIALS, eos, merges, bos="<B>")


@pytest.mark.parametrize("case", TRAINED)
def test_what_the_assistant_wrote_is_trained_on(case: str) -> None:
    template, messages, expected = TRAINED[case]
    tokenizer = tokenizer_of(template)
    example = encode_conversation(tokenizer, messages)
    assert trained_runs(tokenizer, example) == expected
    assert example.loss_mask[-1], "the row ends with what is trained on"


@pytest.mark.parametrize(
    "case", [case for case, (template, _, _) in TRAINED.items() if "marks" not in template]
)
def test_tokens_without_offsets_tell_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of tokenizers that are not fast, or encode conversations in a way of their own."""
    monkeypatch.setattr("medusa_kit.data.rendered.encodes_text", lambda _: False)
    template, messages, expected = TRAINED[case]
    tokenizer = tokenizer_of(template)
    assert not Rendered(tokenizer).as_text
    assert trained_runs(tokenizer, encode_conversation(tokenizer, messages)) == expected


NO_HEADER = EACH + "{{ '<U>' if m.role == 'user' }}{{ m.content + '<E>' }}{% endfor %}"
IN_A_ROW = [*talk("q", "aa", "bb", first="user")[:2], {"role": "assistant", "content": "bb"},
            {"role": "assistant", "content": "cc"}]  # fmt: skip


MARKED_TURNS = (EACH + "{% if m.role == 'user' %}{{ '<U>' + m.content }}{% else %}" + MARK
                + "{{ m.content + '<E>' }}" + UNMARK + "{% endif %}{% endfor %}")  # fmt: skip


@pytest.mark.parametrize("template", [NO_HEADER, MARKED_TURNS])
def test_answers_in_a_row_with_nothing_between_are_turns_of_their_own(template: str) -> None:
    tokenizer = marked_tokenizer(template, SPECIALS)
    example = encode_conversation(tokenizer, IN_A_ROW)
    assert trained_runs(tokenizer, example) == ["aa<E>bb<E>cc<E>"], "all that they wrote"
    (item,) = prepare([example], 2)
    first, *later = [item.ahead_PJ[s : s + 3].tolist() for s in (0, 3, 6)]
    a, end, b, c = example.input_ids[-9], example.input_ids[-1], *example.input_ids[-6::3][:2]
    assert [first, *later] == [
        [[each, each, end], [each, end, -1], [end, -1, -1]] for each in (a, b, c)
    ]
    silent = [IN_A_ROW[0], {**IN_A_ROW[1], "weight": 0}, *IN_A_ROW[2:]]
    assert trained_runs(tokenizer, encode_conversation(tokenizer, silent)) == ["bb<E>cc<E>"]


def test_answers_that_are_written_as_one_are_one_turn() -> None:
    tokenizer = tokenizer_of("merging")
    assert encode_conversation(tokenizer, IN_A_ROW).turn_starts == ()


def test_a_refusal_has_the_true_reason() -> None:
    forgetting = PLAIN.replace("messages %}", "messages if m.role != 'system' %}")
    tokenizer = marked_tokenizer(forgetting, SPECIALS)
    system = {"role": "system", "content": "Be short."}
    with pytest.raises(DataError, match=r"row 4: .* leaves out message 1, of the system"):
        encode_conversation(tokenizer, [system, *TWO], row=4)
    assert encode_conversation(tokenizer, [{**system, "content": ""}, *TWO]).loss_mask
    silent = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in TWO]
    with pytest.raises(DataError, match="every turn of the assistant has weight 0"):
        encode_conversation(tokenizer, silent)
    elsewhere = PLAIN.replace("<E>\n", "<E>").replace(ASK, MARK + "end" + UNMARK)
    with pytest.raises(DataError, match="marks hold none of the assistant's turns"):
        encode_conversation(marked_tokenizer(elsewhere, SPECIALS), TWO)
    around_all = MARK + PLAIN.replace(ASK, UNMARK)
    with pytest.raises(DataError, match="marks enclose message 1, of the user"):
        encode_conversation(marked_tokenizer(around_all, SPECIALS), TWO)

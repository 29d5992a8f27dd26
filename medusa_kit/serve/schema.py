"""What requests may hold. A field that is unknown or not supported is refused by name, unless it
changes no answer (labels.py).

Numbers that say how tokens are chosen are checked by SamplingParams, which the engine uses too.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from medusa_kit.infer.decode.accept.default_sampling import with_defaults
from medusa_kit.serve.bounds import (
    MAX_ANSWERS,
    MAX_BIASES,
    MAX_MESSAGES,
    MAX_TOOLS,
    Biases,
    Few,
    ManyIds,
    ModelName,
    Named,
    Stops,
    Texts,
    TokenIds,
    texts,
)
from medusa_kit.serve.labels import Fields, Labels
from medusa_kit.serve.parts import Parts, UnsupportedFieldError
from medusa_kit.settings.option import options_of
from medusa_kit.settings.sampling import DRAWING, SCORES, SamplingParams
from medusa_kit.shown import shown_json

# Fields of OpenAI's API that are not supported -> the value that asks for nothing, besides null.
UNSUPPORTED: Mapping[str, Any] = {
    "functions": [], "function_call": "none", "modalities": ["text"], "audio": None,
    "verbosity": "medium", "web_search_options": None,
    "moderation": None, "best_of": 1, "echo": False, "suffix": "",
}  # fmt: skip
OF_CHATS: Mapping[str, Any] = {
    "response_format": {"type": "text"}, "tools": [], "tool_choice": "none",
    "parallel_tool_calls": None, "prediction": None, "reasoning_effort": None,
    "chat_template_kwargs": {},
}  # fmt: skip
# The same in messages, which clients send back as they got them.
MESSAGE_UNSUPPORTED: Mapping[str, Any] = {
    "refusal": None, "audio": None, "annotations": [], "function_call": None,
}  # fmt: skip
NAME = r"^[^\s<|\\/>]{1,64}$"  # of a participant, as OpenAI has it: no part of a special token
TOKEN_ID = re.compile(r"(0|-?[1-9][0-9]{0,18})")  # as JSON writes numbers


def _without(data: Any, unsupported: Mapping[str, Any]) -> Any:
    """The fields but those that ask for nothing. Raises for one that asks for what is not there."""
    if not isinstance(data, Mapping):
        return data
    kept = {}
    for name, value in data.items():
        if name not in unsupported:
            kept[name] = value
        elif value is not None and value != unsupported[name]:
            raise UnsupportedFieldError(name, f"the field {name!r} is not supported; leave it out")
    return kept


class FunctionCall(Fields):
    name: str | None = None
    arguments: Any = None  # JSON, or what a client made of it
    parsed_arguments: SkipJsonSchema[Any] = (
        None  # the same, as OpenAI's client sends back what it has read
    )


class ToolCall(Fields):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # sent back from a stream

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: Annotated[str, Field(pattern=NAME)] | None = None
    tool_calls: Annotated[list[ToolCall], Few(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # of the assistant, as answers have it
    parsed: SkipJsonSchema[Any] = None  # `content`, as OpenAI's client sends back what it has read

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        return _drop_null(_without(data, MESSAGE_UNSUPPORTED))

    @model_validator(mode="after")
    def _of_its_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise UnsupportedFieldError("tool_calls", "tool_calls are the assistant's alone")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise UnsupportedFieldError(
                "tool_call_id", "tool_call_id belongs to messages of the role tool, and only there"
            )
        if self.reasoning_content is not None and self.role != "assistant":
            raise UnsupportedFieldError(
                "reasoning_content", "reasoning_content is the assistant's alone"
            )
        if self.content in (None, []) and not (
            self.tool_calls or self.reasoning_content is not None
        ):
            raise UnsupportedFieldError("content", "content is missing")
        return self

    def as_dict(self) -> dict[str, Any]:
        """The message as chat templates take it: text, and OpenAI's newer word for system as the
        older one."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class StreamOptions(Fields):
    include_usage: bool = False
    include_obfuscation: bool = False  # changes nothing


class KitFields(Fields):
    """The field `medusa_kit`: what OpenAI's API has no word for."""

    spans: bool = False  # who drafted what of the text
    tree: bool = False  # the tree of each step
    drafter: ModelName | None = None
    drafter_options: Named | None = None


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _token_ids(value: Any) -> Any:
    """JSON has text alone for keys."""
    if not isinstance(value, Mapping):
        return value
    if len(value) > MAX_BIASES:
        raise ValueError(f"logit_bias: {len(value)} tokens; expected at most {MAX_BIASES}")
    # Not all that `int` reads: "5" and "05" would be two biases of one token.
    wrong = next((key for key in value if not TOKEN_ID.fullmatch(key)), None)
    if wrong is not None:
        raise ValueError(f"logit_bias has the key {shown_json(wrong)}; expected token ids, as '42'")
    return {int(key): bias for key, bias in value.items()}


def _described(schema: dict[str, Any]) -> None:
    """Descriptions of sampling options in the OpenAPI document."""
    for name in (*DRAWING, *SCORES):
        schema["properties"][name]["description"] = options_of(SamplingParams)[name].description


class Request(Labels):
    """What both kinds of request share. Its sampling options are those of SamplingParams."""

    model_config = ConfigDict(json_schema_extra=_described)
    unsupported: ClassVar[Mapping[str, Any]] = {**UNSUPPORTED, **OF_CHATS}

    model: ModelName
    adapter_id: ModelName | None = None  # LoRAX's, for heads
    adapter_source: ModelName | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[Stops | None, BeforeValidator(_several)] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[Biases | None, BeforeValidator(_token_ids)] = None
    seed: int | None = None
    return_token_ids: bool = False  # as vLLM has it
    medusa_kit: KitFields = KitFields()

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        _check_text(data)
        return _drop_null(_without(data, cls.unsupported))

    @model_validator(mode="after")
    def _together(self) -> "Request":
        if self.stream_options is not None and not self.stream:
            raise UnsupportedFieldError(
                "stream_options", "stream_options has no meaning without stream: true"
            )
        return self

    @property
    def longest(self) -> int | None:
        return self.max_tokens

    @property
    def gives_length(self) -> bool:
        """Whether the request says how long an answer may be."""
        return not self.model_fields_set.isdisjoint({"max_tokens", "max_completion_tokens"})

    @property
    def num_top_tokens(self) -> int | None:
        """How many tokens are returned with log-probabilities besides each of the answer; None: no
        log-probabilities are."""
        return None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, config: Any) -> dict[str, Any]:
        """Keywords of the engine, with what is open decided by the kit's rule. A draw from one
        token is greedy; what narrows a draw changes no greedy choice, but has to be in range.

        `config`: the model's own generation config. Raises ConfigError.
        """
        whole = self.top_k in (0, -1)  # as other servers write "all"
        given = self._given(*(name for name in DRAWING if name not in ("top_k", "seed")))
        if self.top_k is not None and not whole:
            given["top_k"] = self.top_k
        if given.get("temperature") == 0 or self.top_p == 0 or self.top_k == 1:
            checked = {**given, "temperature": given.get("temperature") or 1.0}
            if self.top_p == 0:
                del checked["top_p"]
            SamplingParams(**checked)
            chosen = {"temperature": 0.0}
        else:
            SamplingParams.checked(given)
            chosen, _ = with_defaults(given, config, several=self.n > 1)
            chosen = {name: value for name, value in chosen.items() if value is not None}
            if whole:
                chosen.pop("top_k", None)
        return chosen | self._given(*SCORES)

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def _check_text(data: Any) -> None:
    """JSON can write half of a character that takes two escapes, which is no text."""
    for name, value in data.items() if isinstance(data, Mapping) else ():
        try:
            for text in texts([name, value]):
                text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            half = str(error.object)[error.start]
            raise UnsupportedFieldError(
                ascii(name)[1:-1], f"{ascii(name)[1:-1]} holds {half!a}, half of a character"
            ) from None


def _drop_null(data: Any) -> Any:
    """Null stands for a field that is left out."""
    if not isinstance(data, Mapping):
        return data
    return {name: value for name, value in data.items() if value is not None}


class Prediction(Fields):
    type: Literal["content"]
    content: str | Parts


class ChatRequest(Request):
    unsupported: ClassVar[Mapping[str, Any]] = UNSUPPORTED

    messages: Annotated[list[Message], Few(min_length=1, max_length=MAX_MESSAGES)]
    response_format: Named | None = None  # these four are checked in tools.py
    tools: Annotated[list[Named], Few(max_length=MAX_TOOLS)] | None = None
    tool_choice: ModelName | Named | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Named | None = None  # as vLLM has it
    reasoning_effort: ModelName | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    prediction: Prediction | None = None  # changes nothing
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _chat_together(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise UnsupportedFieldError(
                "top_logprobs", "top_logprobs has no meaning without logprobs: true"
            )
        if (
            None not in (both := (self.max_tokens, self.max_completion_tokens))
            and both[0] != both[1]
        ):
            raise UnsupportedFieldError(
                "max_tokens", f"max_tokens {both[0]} and max_completion_tokens {both[1]} mean the "
                "same; give one of them",
            )  # fmt: skip
        _check_results(self.messages)
        return self

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top_tokens(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _check_results(messages: Sequence[Message]) -> None:
    """Results answer a call that the assistant made before; their `name` is the function's."""
    called: dict[str | None, str | None] = {}
    for index, message in enumerate(messages):
        called |= {call.id: call.function.name for call in message.tool_calls or ()}
        if message.role != "tool":
            continue
        if message.tool_call_id not in called:
            raise UnsupportedFieldError(
                f"messages.{index}.tool_call_id",
                f"tool_call_id {message.tool_call_id!r} is that of no earlier call",
            )
        name = called[message.tool_call_id]
        if name and message.name not in (None, name):
            raise UnsupportedFieldError(
                f"messages.{index}.name",
                f"name {message.name!r} is not that of the function that was called, {name!r}",
            )


def _one_kind(value: Any) -> Any:
    if isinstance(value, list) and {type(item) for item in value} not in ({str}, {int}, {list}):
        raise ValueError(
            f"prompt {shown_json(value)}: expected text, token ids, or a list of either that is "
            "not empty"
        )
    return value


class CompletionRequest(Request):
    unsupported: ClassVar[Mapping[str, Any]] = {
        name: value for name, value in {**UNSUPPORTED, **OF_CHATS}.items() if name != "best_of"
    }

    prompt: Annotated[str | TokenIds | Texts | ManyIds, BeforeValidator(_one_kind)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _returns_all(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n):
            raise UnsupportedFieldError(
                "best_of",
                f"best_of {self.best_of} is not supported with n {self.n}: all answers are "
                "returned; "
                "leave it out",
            )
        return self

    @property
    def longest(self) -> int | None:
        return self.max_tokens or 16  # OpenAI's own default

    @property
    def num_top_tokens(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)

"""POST /v1/chat/completions."""

import asyncio
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from medusa_kit.background import in_background
from medusa_kit.data.template import chat_template
from medusa_kit.data.text_size import check_size
from medusa_kit.serve.calls.call_form import HERMES
from medusa_kit.serve.calls.reading import reader_of
from medusa_kit.serve.calls.template_calls import form_of
from medusa_kit.serve.calls.template_variables import template_variables
from medusa_kit.serve.calls.tool_calls import Reader, delta_of, read_answer
from medusa_kit.serve.calls.tools import Constraint
from medusa_kit.serve.logprobs import token_logprobs
from medusa_kit.serve.operations.body_route import BodyRoute
from medusa_kit.serve.schema import ChatRequest
from medusa_kit.serve.service import Service
from medusa_kit.serve.streaming import Piece, Reply, respond, service_of

router = APIRouter(route_class=BodyRoute)


class ChatReply(Reply):
    whole_name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, service: Service, request: ChatRequest, constraint: Constraint) -> None:
        super().__init__(service, request, constraint)
        self._readers: dict[int, Reader] = {}  # of streamed answers

    def choice(self, index: int, piece: Piece, reason: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if self.reading.tags:
            read = read_answer(piece.text, reason, reader_of(self.reading))
            message["content"], reason = read.content, read.finish_reason
            if read.reasoning:
                message["reasoning_content"] = read.reasoning
            if read.tool_calls:
                message["tool_calls"] = read.tool_calls
            else:  # a message that is sent back needs one of them
                message["content"] = read.content or ""
        return self._choice(index, {"message": message}, piece, reason)

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text or reason is None else {}
        if self.reading.tags:
            reader = self._readers.setdefault(index, reader_of(self.reading))
            pieces = reader.push(piece.text)
            if reason is not None:
                pieces += reader.finish()
                reason = reader.finish_reason(reason)
            delta = delta_of(pieces)
        return self._choice(index, {"delta": delta}, piece, reason)

    def _choice(
        self, index: int, content: dict[str, Any], piece: Piece, reason: str | None
    ) -> dict[str, Any]:
        scores = None
        if self.request.num_top_tokens is not None:
            scores = {"content": token_logprobs(piece.scored), "refusal": None}
        choice = {"index": index, **content, "logprobs": scores, "finish_reason": reason}
        return choice | self.extras(piece)


@router.post("/v1/chat/completions")
async def chat_completions(request: ChatRequest, http: Request) -> Response:
    """Answer a conversation."""
    service = service_of(http)
    messages = [message.as_dict() for message in request.messages]
    shown = None if request.tool_choice == "none" else request.tools
    check_size(service.engine.base.info.context_length, messages, shown or [])
    deadline, tokenizer, form = service.deadline(), service.engine.base.tokenizer, HERMES
    if request.tools:
        form = await deadline.wait(asyncio.wrap_future(in_background(form_of, tokenizer)))
    asked = request.response_format, request.tools, request.tool_choice
    constraint = await deadline.wait(
        service.constraints.of(*asked, request.parallel_tool_calls, form)
    )
    template = chat_template(tokenizer) or ""
    variables = template_variables(request.chat_template_kwargs, request.reasoning_effort, template)
    constraint = replace(constraint, variables=variables)
    http.state.notes = list(constraint.notes)  # for the log
    return await respond(ChatReply(service, request, constraint), [messages], http, deadline)

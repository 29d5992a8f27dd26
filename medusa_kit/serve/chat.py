"""POST /v1/chat/completions."""

from typing import Any

from fastapi import APIRouter, Request, Response

from medusa_kit.serve.logprobs import token_logprobs
from medusa_kit.serve.schema import ChatRequest
from medusa_kit.serve.streaming import Piece, Reply, respond, service_of

router = APIRouter()


class ChatReply(Reply):
    whole_name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, index: int, piece: Piece, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text}
        return self._choice(index, {"message": message}, piece, reason)

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text or reason is None else {}
        return self._choice(index, {"delta": delta}, piece, reason)

    def _choice(
        self, index: int, said: dict[str, Any], piece: Piece, reason: str | None
    ) -> dict[str, Any]:
        scores = None
        if self.asked.num_likeliest is not None:
            content = token_logprobs(self.tokenizer, piece.tokens, piece.scores)
            scores = {"content": content, "refusal": None}
        told = {"index": index, **said, "logprobs": scores, "finish_reason": reason}
        return told | self.extras(piece)


@router.post("/v1/chat/completions")
async def chat_completions(asked: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    messages = [message.as_dict() for message in asked.messages]
    return await respond(ChatReply(service_of(request), asked), [messages], request)

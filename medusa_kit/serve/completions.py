"""POST /v1/completions: text goes on, without a chat template."""

from typing import Any

from fastapi import APIRouter, Request, Response

from medusa_kit.serve.logprobs import completion_logprobs
from medusa_kit.serve.operations.body_route import BodyRoute
from medusa_kit.serve.schema import CompletionRequest
from medusa_kit.serve.streaming import Piece, Reply, respond, service_of

router = APIRouter(route_class=BodyRoute)


class CompletionReply(Reply):
    whole_name = chunk_name = "text_completion"
    prefix = "cmpl"

    def choice(self, index: int, piece: Piece, reason: str) -> dict[str, Any]:
        return self.delta(index, piece, reason)

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, piece: Piece, reason: str | None) -> dict[str, Any]:
        scores, count = None, self.request.num_top_tokens
        if count is not None:
            scores = completion_logprobs(piece.scored, count)
        choice = {"index": index, "text": piece.text, "logprobs": scores, "finish_reason": reason}
        return choice | self.extras(piece)


@router.post("/v1/completions")
async def completions(request: CompletionRequest, http: Request) -> Response:
    """Go on with one text or several."""
    return await respond(CompletionReply(service_of(http), request), request.prompts, http)

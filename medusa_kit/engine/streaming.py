"""An answer's text as it comes: pieces, each of which says who drafted what of it."""

import asyncio
import atexit
import inspect
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakSet

from medusa_kit.engine.result import GenerationResult
from medusa_kit.errors import Live
from medusa_kit.infer.decode.detokenize import TextStream
from medusa_kit.infer.decode.request import Emission, Request
from medusa_kit.infer.details import VerifiedTree
from medusa_kit.locks import SharedLock
from medusa_kit.usual_device import on_usual_device


class Span(NamedTuple):
    """The text that one token completed. `guessed_by`: the drafter whose draft token the base model
    accepted; None where the base model named the token by itself."""

    text: str
    guessed_by: str | None


class Piece(str):
    """The text that a step added; `spans` has it token by token."""

    spans: tuple[Span, ...]

    def __new__(cls, spans: Sequence[Span]) -> "Piece":
        piece = super().__new__(cls, "".join(span.text for span in spans))
        piece.spans = tuple(spans)
        return piece

    def __getnewargs__(self) -> tuple[tuple[Span, ...]]:  # type: ignore[override]  # for copies
        return (self.spans,)


class Streaming(Live):
    """An iterator over the pieces of an answer's text as they come; it can be read once.

    It may be dropped or closed early (`close()`), from another thread too. `result` then holds the
    answer so far.
    """

    def __init__(
        self,
        steps: Callable[[], Iterator[Sequence[Emission]]],
        request: Request,
        text: TextStream,
        result: Callable[[], GenerationResult],
        drafter: str,
        cancel: Callable[[], None] | None = None,
    ) -> None:
        """`steps`: begins those of `request`, and has what each emitted. `drafter`: the name of its
        drafter. `cancel`: ends the steps, where another thread makes them."""
        self._steps, self._request, self._text, self._cancel = steps, request, text, cancel
        self._result, self._drafter = result, drafter
        # The answer's tokens so far by who drafted them, those without text of their own included
        # (the end of the answer, parts of a character); keys as in Span.
        self.guessed: Counter[str | None] = Counter()
        # Of the newest step that verified draft tokens, once `keep_tree` has been called.
        self.tree: VerifiedTree | None = None
        self._pieces = self._decoded()
        self._turn = SharedLock()  # one thread at a time reads or closes it
        self.ended = False  # nothing more will come
        self.failed = False  # since an error was raised
        _streams.add(self)

    def __iter__(self) -> "Streaming":
        return self

    @on_usual_device
    def __next__(self) -> Piece:
        with self._turn:
            try:
                return next(self._pieces)
            except StopIteration:
                self.ended = True
                raise
            except BaseException as error:  # a person who interrupts it keeps what there is
                self.ended, self.failed = True, isinstance(error, Exception)
                raise

    def __aiter__(self) -> "Streaming":
        return self

    async def __anext__(self) -> Piece:
        """The same for `async for`: steps are made in a thread meanwhile."""
        piece = await asyncio.to_thread(next, self, None)
        if piece is None:
            raise StopAsyncIteration
        return piece

    def close(self) -> None:
        """End the answer, after the step that another thread is in, and free its memory."""
        if self._cancel is not None:
            self._cancel()
        with self._turn:
            # It runs in a forked child whose parent's thread ran it, and nobody goes on with it.
            if inspect.getgeneratorstate(self._pieces) != inspect.GEN_RUNNING:
                self._pieces.close()
            self.ended = True

    def _decoded(self) -> Generator[Piece, None, None]:
        guesser = None
        for emissions in self._steps():
            spans = []
            for one in emissions:
                if one.tree is not None and len(one.tree.tokens) > 1:
                    self.tree = one.tree
                for token, guesser in zip(
                    one.tokens, [*one.guessers(self._drafter), None], strict=False
                ):
                    self.guessed[guesser] += 1
                    if text := self._text.push(self._request.text_ids([token])):
                        spans.append(Span(text, guesser))
            if spans:
                yield Piece(spans)
        if text := self._text.finish():
            yield Piece([Span(text, guesser)])

    def keep_tree(self) -> None:
        """Have `tree` filled, before the first piece is read. On CUDA the steps then run one kernel
        after another, not as graphs."""
        self._request.output_options = self._request.output_options._replace(tree=True)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the answer so far."""
        return (
            len(self._request.token_ids) / self._request.seconds if self._request.seconds else 0.0
        )

    @property
    def result(self) -> GenerationResult:
        return self._result()


_streams: WeakSet[Streaming] = WeakSet()


@atexit.register
def _close_streams() -> None:
    """Closes all streams at exit, while the modules that closing needs are still loaded."""
    for stream in list(_streams):
        if stream._turn.acquire(blocking=False):  # else a thread that goes on is reading it
            stream.close()

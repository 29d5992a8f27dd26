"""One request and its state while it is decoded."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from medusa_kit.errors import ConfigError, ContextLengthError, check_count
from medusa_kit.infer.accept.token_choice import TokenChooser
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.detokenize import StopStrings
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.sampling import SamplingParams


@dataclass
class Row:
    """What was asked, what has been emitted, and statistics of the steps."""

    prompt_ids: list[int]
    chooser: TokenChooser
    max_new_tokens: int
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_steps: int = 0
    depth_counts: dict[int, int] = field(default_factory=dict)  # accepted depth -> steps
    num_guessed: int = 0  # of the newest step's tokens: these came first, from a drafter
    steps_run_by: str = "torch"
    attention: AttentionChoice | None = None  # that its steps used

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Emit tokens up to the first stop and drop the rest. Returns those emitted."""
        for count, token in enumerate(tokens, start=1):
            self.token_ids.append(token)
            if token in self.stop_ids or (self.stop_strings and self.stop_strings.push(token)):
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return list(tokens[:count])
        return list(tokens)

    def text_ids(self, tokens: Sequence[int]) -> list[int]:
        """Those of these tokens that belong to the answer's text: all but the stop tokens."""
        return [token for token in tokens if token not in self.stop_ids]

    def count_step(self, num_emitted: int, path_length: int) -> None:
        """Of a step that was cut, only accepted nodes that were emitted count."""
        depth = min(num_emitted, path_length)
        self.num_steps += 1
        self.num_guessed = depth
        self.depth_counts[depth] = self.depth_counts.get(depth, 0) + 1


Emitted = list[tuple[Row, list[int]]]


def make_row(
    verifier: Verifier,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    max_new_tokens: int,
    stop_strings: StopStrings | None = None,
) -> Row:
    """A row ready to decode. `max_new_tokens` is reduced to what the context holds.

    Raises ContextLengthError for a prompt that fills the context, ConfigError for an empty one.
    """
    context = verifier.base.info.context_length
    check_count("max_new_tokens", max_new_tokens)
    if not prompt_ids:
        raise ConfigError("the prompt has no token", hint="give some text")
    if len(prompt_ids) >= context:
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens; the model's context holds {context}, "
            "answer included",
            hint="shorten the prompt",
        )
    return Row(
        list(prompt_ids),
        TokenChooser(verifier.base.model, sampling, prompt_ids, max_new_tokens),
        min(max_new_tokens, context - len(prompt_ids)),
        verifier.base.stop_token_ids,
        stop_strings,
    )

"""How the next token is chosen: greedy, or drawn exactly, from the base model's processed logits.

Processing (logits_processing.py) is applied to a node's logits with that node's own prefix: prompt,
committed tokens, path. Only nodes that the walk reaches are processed.

A draw uses Gumbel noise that depends only on the seed, the token's absolute position and the token:
argmax(log p + noise) is a sample of p. So the text is the same for every drafter, tree and batch.

Typical acceptance asks which draft tokens are likely enough: `Sampler.judge`.

Shapes: V vocabulary, C some of its tokens, T tokens of a prefix, N nodes, X any shape.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_kit.heads.draws import RowDraws
from medusa_kit.heads.noise import gumbel_of, mixed, noisy, signed
from medusa_kit.infer.decode.accept.draws import Warping, kernels_draw, split_warpers
from medusa_kit.infer.decode.accept.grammar import GrammarMask
from medusa_kit.infer.decode.accept.logits_processing import Settings, logits_processors
from medusa_kit.infer.decode.accept.rules import Verdict
from medusa_kit.infer.likeliest import no_scores
from medusa_kit.one_thread import one_thread
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.transfer import to_device


class Sampler:
    """Names the token after a node of one request's tree."""

    def __init__(
        self,
        base: Settings,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        processors: Any = None,
        mask: GrammarMask | None = None,
    ) -> None:
        """`processors`: in place of those that the base and `params` ask for. `mask`: of the
        grammar of `params`; this row's alone.

        Raises ConfigError for a bias on a token that the model does not have, and for what the
        base's generation config asks for and is not possible.
        """
        self.params, self.mask = params, mask
        if processors is None:
            processors = logits_processors(base, params, prompt_ids, max_new_tokens, mask)
        self._processors = processors
        self._before_warpers, self._warping = split_warpers(processors)
        # Whether the token is the argmax of the model's logits, taken for all nodes at once.
        self.takes_argmax = params.greedy and params.grammar is None and not processors
        # Whether tokens are drawn exactly: neither greedy nor typical.
        self.draws = not (params.greedy or params.lossy)

    @one_thread()
    def choose(self, logits_V: Tensor, prefix: Sequence[int]) -> int:
        """The token after `prefix`, whose last token gave `logits_V`. Raises NotFiniteError where
        what processing leaves has no finite score."""
        if self.draws and self._warping is not None and kernels_draw(logits_V.device):
            scores_V = _processed_by(self._before_warpers, logits_V, prefix)
            return self.drawn_at(scores_V, len(prefix))
        scores_V = self.scores(logits_V, prefix)
        best_1 = scores_V.argmax(-1, keepdim=True)
        pair = torch.cat([best_1.double(), scores_V.gather(0, best_1)])
        token, score = pair.tolist()  # one transfer
        if not math.isfinite(score):
            raise no_scores(len(prefix))
        return int(token)

    def draws_by_position(self, logits_NV: Tensor) -> bool:
        """Whether `drawn_at` names tokens after these nodes: nothing depends on the text."""
        own = self.draws and self._warping is not None and not self._before_warpers
        return own and logits_NV.dtype == torch.float32 and kernels_draw(logits_NV.device)

    def drawn_at(self, scores_V: Tensor, position: int) -> int:
        """The token at this position by the C++ kernels. Raises NotFiniteError as `choose`."""
        assert self._warping is not None
        token = self._warping.draw(scores_V, self.params.seed, position)
        if not math.isfinite(scores_V[token].item()):
            raise no_scores(position)
        return token

    def scores(self, logits_V: Tensor, prefix: Sequence[int]) -> Tensor:
        """scores_V whose argmax is the token: processed logits, plus Gumbel noise for an exact
        draw."""
        scores_V = self._processed(logits_V, prefix)
        if not self.draws:
            return scores_V
        return noisy(scores_V, self.params.seed, len(prefix))

    @property
    def draws_alike(self) -> Warping | None:
        """Of requests with the same one, `drawn_after` of any draws the tokens of all.

        None where a node's logits are processed by its own prefix, or have to be sorted: for all
        nodes that takes longer than waiting for those that are reached.
        """
        warping = self._warping
        if not self.draws or self._before_warpers or warping is None:
            return None
        return warping if warping.top_p == 1.0 and warping.min_p == 0.0 else None

    def seeds(self, first: int, depths: Sequence[int]) -> list[int]:
        """The seeds of the tokens that follow nodes of these depths, for `drawn_after`. `first`:
        the position of the one behind the root."""
        by_depth = [signed(mixed(self.params.seed, first + d)) for d in range(max(depths) + 1)]
        return [by_depth[depth] for depth in depths]

    def drawn_after(self, logits_NV: Tensor, seeds: Sequence[int]) -> Tensor:
        """tokens_N as `choose` names them after nodes, whose requests may be several."""
        scores_NV = logits_NV.float()
        for process in self._processors:
            scores_NV = process(None, scores_NV)
        seeds_N1 = to_device(seeds, scores_NV.device)[:, None]
        tokens_V = torch.arange(scores_NV.shape[1], device=scores_NV.device)
        return (scores_NV + gumbel_of(seeds_N1, tokens_V)).argmax(-1)

    def draws_after(self, length: int) -> RowDraws | None:
        """How the tokens behind a prefix of this length and one token more will be drawn, for
        drafters that draft them; None where they are not, or not in numbers."""
        if not self.draws or self._warping is None:
            return None
        return RowDraws(self.params.temperature, self.params.seed, length + 1)

    @one_thread()
    def judge(self, logits_V: Tensor, prefix: Sequence[int], tokens: Sequence[int]) -> Verdict:
        """The verdict of typical acceptance: are these draft tokens likely enough? Raises as
        `choose`.

        The bar is min(epsilon, delta · exp(-entropy)) of the processed distribution (§2.3.1).
        """
        log_V = self._processed(logits_V, prefix).log_softmax(-1)
        entropy = -(log_V.exp() * log_V).nansum()  # 0 · log 0 counts as 0
        guessed_C = log_V[torch.tensor(tokens, dtype=torch.int64, device=log_V.device)]
        best_1 = log_V.argmax(-1, keepdim=True)
        numbers = [guessed_C, entropy[None], log_V.gather(0, best_1), best_1.double()]
        *log_probs, uncertainty, highest, top_token = torch.cat(numbers).tolist()  # one transfer
        if not math.isfinite(highest):
            raise no_scores(len(prefix))
        epsilon, delta = self.params.thresholds
        bar = min(math.log(epsilon), math.log(delta) - uncertainty)
        return Verdict(int(top_token), log_probs, bar)

    def _processed(self, logits_V: Tensor, prefix: Sequence[int]) -> Tensor:
        return _processed_by(self._processors, logits_V, prefix)


@one_thread()
def has_scores(logits_V: Tensor) -> bool:
    """Whether a token can follow: no logit is NaN, and the highest is finite. The host waits for
    a device."""
    return math.isfinite(float(logits_V.max()))


def _processed_by(processors: Sequence[Any], logits_V: Tensor, prefix: Sequence[int]) -> Tensor:
    """scores_V in float32, as these processors leave them."""
    scores_1V = logits_V[None].float()
    if processors:
        prefix_1T = to_device([list(prefix)], logits_V.device)
        for process in processors:  # the list's own call inspects signatures every time
            scores_1V = process(prefix_1T, scores_1V)
    return scores_1V[0]

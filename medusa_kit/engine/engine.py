"""The engine: a base model with heads and a tree, ready to generate. The CLI and users call it.

Shapes: B batch, N nodes with root.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Unpack

from medusa_kit.base.model import BaseModel
from medusa_kit.base.tokenizer.ids import as_token_ids, check_token_ids
from medusa_kit.data.chat import encode_prompt
from medusa_kit.data.template import chat_template
from medusa_kit.drafters.factory import DraftContext
from medusa_kit.drafters.memory import Memory
from medusa_kit.drafters.mixed.auto import chosen
from medusa_kit.drafters.mixed.from_files import read_files
from medusa_kit.drafters.native.layer_drafts import draft_config, layers_read
from medusa_kit.engine.conversation import Conversation
from medusa_kit.engine.decoding import decode, emissions
from medusa_kit.engine.given import (
    Prompt,
    check_prompt,
    check_roles,
    given_drafter,
    output_options,
    prompt_list,
    sampling_of,
    stop_strings,
)
from medusa_kit.engine.public import API, Closable, closable, described
from medusa_kit.engine.result import GenerationResult, GenerationStats
from medusa_kit.engine.shared_batch import SharedBatch, check_options
from medusa_kit.engine.streaming import Streaming
from medusa_kit.errors import ConfigError, ContextLengthError, check_count, unknown_value
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.cpu.activations import activations_of
from medusa_kit.infer.cpu.cache_dtype import FLOAT32, cache_of
from medusa_kit.infer.decode.detokenize import StopStrings, TextStream, text_before
from medusa_kit.infer.decode.drafter import NODES, Drafter
from medusa_kit.infer.decode.grammars.check import check_grammar
from medusa_kit.infer.decode.request import Request, make_request
from medusa_kit.infer.decode.schedule import MAX_PAUSE
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.decode.threaded.request_queue import MAX_WAITING
from medusa_kit.infer.details import NOTHING, OutputOptions
from medusa_kit.infer.self_check import TreeCheck
from medusa_kit.infer.verifier import Verifier
from medusa_kit.settings.drafters import (
    DRAFTERS,
    READ_HEADS,
    default_drafter,
    drafts_without_heads,
)
from medusa_kit.settings.sampling import SamplingOptions, SamplingParams
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.plan import PlannedTree, Tree, TreePlan, fitted
from medusa_kit.usual_device import on_usual_device

MOST_ANSWERS = 1_000_000  # to each prompt of a call, which are made ready together


@closable
@dataclass(repr=False)
class Engine(Closable):
    """Generates text exactly as the base model would, faster. Build with `medusa_kit.load`.

    Only acceptance="typical", weights="int8" and cache="float16" leave the base model's
    distribution; statistics then say so. With activations="int16" or "int8" it is that of plain
    decoding in the same precision.
    """

    verifier: Verifier
    check: TreeCheck
    scheduler: Scheduler  # of requests to the same base model, whichever engine makes them
    heads: MedusaHeads | None = None
    tree: Tree = field(default_factory=CandidateTree.root_only)  # for one prompt at a time
    heads_source: str | None = None
    plan: TreePlan | None = None  # trees by batch size, where tree.json has several
    drafter: str | None = None  # unless a call names one
    usual_drafter: str | None = None  # where none is named; None: heads, if there are any
    drafter_options: dict[str, Any] = field(default_factory=dict)  # of that drafter
    draft_model: str | BaseModel | None = None  # a smaller model, for drafters that use one
    memory: Memory = field(default_factory=Memory)  # what drafters keep between calls
    fallback: str | None = None  # in place of a drafter that reads heads where there are none
    heads_refused: str | None = None  # why heads that were found are not used

    def __repr__(self) -> str:
        return described(self)

    def __dir__(self) -> list[str]:
        return list(API)

    @property
    def own_drafter(self) -> str:
        """The drafter that is used unless a call names another."""
        return self._own_drafter()[0]

    @property
    def drafts_without_heads(self) -> bool:
        """Whether another drafter than heads is configured for heads that do not fit."""
        return drafts_without_heads(self.drafter, self.draft_model is not None, self.fallback)

    @property
    def base(self) -> BaseModel:
        return self.verifier.base

    @property
    def weights(self) -> str:
        """The weights that the base computes with: checkpoint, or int8, which is lossy."""
        return self.base.info.weights

    @property
    def activations(self) -> str:
        """The precision of what quantised weights are multiplied by: float32, int16 or int8."""
        return activations_of(self.verifier)

    @property
    def cache(self) -> str:
        """How keys and values are stored: float32, or float16, which is lossy."""
        return cache_of(self.verifier)

    @property
    def lossy_by(self) -> list[str]:
        """The options in use that make answers differ from the base model's; empty if exact."""
        weights = [f"{self.weights} weights"] if self.base.info.lossy else []
        return weights + ([f"{self.cache} cache"] if self.cache != FLOAT32 else [])

    @property
    def rounding_tolerance(self) -> float:
        """How far rounding may move a logit, as measured at load and by each compiled forward."""
        return max(self.check.rounding_tolerance, self.verifier.rounding_tolerance)

    @property
    def steps_run_by(self) -> str:
        """What runs steps. Each answer's statistics name what ran its own."""
        return self.verifier.steps_run_by

    @property
    def attention(self) -> AttentionChoice:
        """The backends of tree attention in steps."""
        return self.verifier.attention

    @on_usual_device
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] | None = None,
        drafter: str | Drafter | None = None,
        drafter_options: Mapping[str, Any] | None = None,
        batch_size: int = 8,
        n: int = 1,
        logprobs: int | None = None,
        progress: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Any:
        """Answer one prompt (GenerationResult) or a list of prompts (a list of them).

        A prompt is a list of chat messages, a string or a list of token ids. `drafter`: a name from
        settings.drafters.DRAFTERS with its options (the engine's own unless given), or a drafter;
        none is plain decoding through the same loop. The text is the same with each of them.
        `n`: answers to each prompt, as a list; answer i is that of seed + i. `logprobs`: the result
        has the base model's log-probability of each token and of so many of the likeliest.
        `progress`: on stderr.
        `sampling`: the fields of SamplingParams (temperature, top_k, top_p, seed, grammar, …);
        greedy unless given.
        Raises ConfigError, ContextLengthError, and what one of the answers failed of, such as
        NotFiniteError: the others of its list are lost. `shared_batch` has an error for each.
        """
        prompts, single = prompt_list(prompt)
        check_count("batch_size", batch_size)
        check_count("n", n, most=MOST_ANSWERS)
        params = sampling_of(sampling)
        seeds = [replace(params, seed=params.seed + number) for number in range(n)]
        stops, wanted = stop_strings(stop), output_options(logprobs)
        requests = [self._make_request(each, one, max_new_tokens, stops, wanted)
                    for each in prompts for one in seeds]  # fmt: skip
        batch_size = min(batch_size, len(requests))
        built = self.drafter_for(drafter, drafter_options, batch_size, params)
        decode(self.scheduler, requests, built, batch_size, progress)
        results = [self.result_of(request, built.describe(), built.notes) for request in requests]
        if n == 1:
            return results[0] if single else results
        answers = [results[first : first + n] for first in range(0, len(results), n)]
        return answers[0] if single else answers

    @on_usual_device
    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] | None = None,
        drafter: str | Drafter | None = None,
        drafter_options: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Streaming:
        """Iterate over pieces of the answer, with `for` or `async for`: text whose `spans` say who
        drafted what of it.

        The object's `result` is there at the end. `logprobs`: as of `generate`.
        """
        request, stops, params = self.request_for("stream", prompt, max_new_tokens, stop, sampling)
        request.output_options = output_options(logprobs)
        built = self.drafter_for(drafter, drafter_options, 1, params)
        return Streaming(
            lambda: self.scheduler.run([request], built, note=emissions),
            request,
            TextStream(self.base.tokenizer, stops, prompt=request.prompt_ids),
            lambda: self.result_of(request, built.describe(), built.notes),
            drafter.name if isinstance(drafter, Drafter) else drafter or self.own_drafter,
        )

    @on_usual_device
    def shared_batch(
        self,
        max_rows: int = 8,
        most_waiting: int = MAX_WAITING,
        max_pause: float | None = MAX_PAUSE,
    ) -> SharedBatch:
        """A batch with a thread of its own, that any number of threads give prompts to; to be
        closed, or used in `with`. Each answer is the one that `generate` gives; calls of `generate`
        and `stream` take part in its steps meanwhile.

        `max_rows`: prompts that are answered at once; `most_waiting` others may wait. `max_pause`:
        seconds for which reading prompts may hold up the answers under way between two of their
        steps; None: until they have been read. Where weights change, answers under way end in a
        ModelChangedError, and those after them are of the changed model.
        Raises ConfigError.
        """
        check_options(max_rows, most_waiting, max_pause)
        # The batch that stays suits what it may draft for.
        watched = layers_read(draft_config(self.draft_model), self.base.config)
        return SharedBatch(self, max_rows, most_waiting, max_pause, watched)

    def conversation(self, system: str | None = None) -> Conversation:
        """A conversation, in which each turn encodes and reads only what is new."""
        return Conversation(self, system)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, through the chat template where there is one. Raises ConfigError
        for an id that the model has no row for, DataError where the template refuses."""
        check_prompt(prompt)
        if not isinstance(prompt, str) and (not prompt or isinstance(prompt[0], Integral)):
            return as_token_ids(prompt, self.base.info.vocab_size)
        if self.base.tokenizer is None:
            raise ConfigError(
                "this base model came without a tokenizer", hint="give token ids as the prompt"
            )
        check_roles(prompt, chat_template(self.base.tokenizer))
        ids = encode_prompt(self.base.tokenizer, prompt)  # type: ignore[arg-type]
        check_token_ids(ids, self.base.info.vocab_size, self.base.tokenizer)
        return ids

    def use_tree(self, tree: Tree | TreePlan) -> None:
        """Decode with another tree from now on. Raises TreeError where the heads cannot fill it."""
        tree = fitted(tree, self.verifier.chains_only)
        if self.heads is not None:
            tree.check_fits(self.heads.num_heads, self.heads.num_columns)
        self.plan, self.tree = (None, tree) if isinstance(tree, Tree) else (tree, tree.for_batch(1))

    def tree_for(self, batch_size: int) -> Tree:
        return self._planned_for(batch_size).tree

    def _planned_for(self, batch_size: int) -> PlannedTree:
        return (self.plan or TreePlan.of_tree(self.tree)).planned_for(batch_size)

    def request_for(
        self, call: str, prompt: Any, max_new_tokens: int, stop: Any, sampling: "SamplingOptions"
    ) -> tuple[Request, tuple[str, ...], SamplingParams]:
        """(request, stop strings, sampling) of a call that takes a single prompt."""
        stops, params = stop_strings(stop), sampling_of(sampling)
        prompts, single = prompt_list(prompt)
        if not single:
            raise ConfigError(
                f"{call} was given {len(prompts)} prompts; expected one",
                hint=f"call {call} once for each, or generate for all of them",
            )
        return self._make_request(prompts[0], params, max_new_tokens, stops), stops, params

    @on_usual_device
    def _make_request(
        self, prompt: Prompt, sampling: SamplingParams, max_new_tokens: int,
        stops: tuple[str, ...], wanted: OutputOptions = NOTHING,
    ) -> Request:  # fmt: skip
        def make() -> Request:
            stop_watcher = StopStrings(self.base.tokenizer, stops) if stops else None
            return make_request(
                self.verifier, self.encode(prompt), sampling, max_new_tokens, stop_watcher
            )

        number = self.base.number
        try:
            request = make()
        except (ConfigError, ContextLengthError):  # by the sizes that the model had
            check_grammar(sampling.grammar)  # no sizes mend it
            if self.base.changes() == number:
                raise
            request = make()
        request.rounding_tolerance = self.rounding_tolerance
        request.output_options = wanted
        return request

    @property
    def pays(self) -> bool:
        """Whether draft tokens are verified only where they gain more than they cost."""
        return self.scheduler.steps is not None

    def _draft_cost_notes(self, request: Request) -> list[str]:
        """Notes on how many draft tokens were verified in a step, and what more would have cost."""
        steps = self.scheduler.steps
        if steps is None or not request.num_together:
            return []
        rows, nodes = (
            request.num_together / request.num_steps,
            request.num_nodes / request.num_steps,
        )
        beside = (
            "" if request.num_together == request.num_steps else f" of {rows:.1f} requests together"
        )
        return [f"{NODES}{nodes:.2f} verified a step{beside}; {steps.cost.describe(rows)}"]

    def read_drafters_files(self) -> None:
        """Read what the engine's drafters need from files, so that no request waits for it. Raises
        CheckpointError, IncompatibleBaseError, ConfigError for what cannot be used."""
        read_files(self._draft_context(1, None), *self._own_drafter())

    @on_usual_device
    def drafter_for(
        self,
        name: str | Drafter | None,
        options: Mapping[str, Any] | None = None,
        batch_size: int = 1,
        sampling: SamplingParams | None = None,
    ) -> Drafter:
        """A drafter by name, ready for a batch; the engine's own where none is named, and a drafter
        as it is. Raises ConfigError for one that is unknown or has nothing to draft with."""
        self.look_at_heads()
        if isinstance(name, Drafter):
            return given_drafter(name, options, self.activations)
        context = self._draft_context(batch_size, sampling)
        name, options = self.drafter_named(name, options)
        return chosen(name, context, options)

    def _draft_context(self, batch_size: int, sampling: SamplingParams | None) -> DraftContext:
        # Where draft tokens are verified as they gain, the largest tree is cut to fit.
        planned = self._planned_for(1 if self.pays else batch_size)
        return DraftContext(
            self.verifier,
            self.heads,
            tree=planned.tree if self.heads is not None else None,
            acceptance=planned.acceptance,
            paying=self.pays,
            draft_model=self.draft_model,
            batch_size=batch_size,
            sampling=sampling or SamplingParams(),
            memory=self.memory,
            heads_refused=self.heads_refused,
        )

    def look_at_heads(self) -> None:
        """Before an answer begins: heads go where the model is, in its dtype (somebody may have
        moved it, or them), and those that were written to are packed anew."""
        if self.heads is None:
            return
        wanted = self.base.device, self.base.dtype
        weights = [one for one in self.heads.parameters() if not one.requires_grad]
        if any((one.device, one.dtype) != wanted for one in weights):
            self.heads.to(*wanted)
        if self.heads.guesser is not None:
            self.heads.guesser.look()

    def drafter_named(
        self, name: str | None, options: Mapping[str, Any] | None
    ) -> tuple[str, Mapping[str, Any] | None]:
        """The drafter that a call asks for, and its options."""
        own, own_options = self._own_drafter()
        if name is not None and not isinstance(name, str):
            raise unknown_value("drafter", name, DRAFTERS, "leave out drafter")
        name = own if name is None else name
        return name, own_options if options is None and name == own else options

    def _own_drafter(self) -> tuple[str, Mapping[str, Any]]:
        """(name, options) of the drafter that calls use where they name none. A fallback does not
        get the options of the drafter that it replaces."""
        if self.heads is None and self.fallback and self.drafter in (None, *READ_HEADS):
            return self.fallback, {}
        default = default_drafter(self.heads is not None, self.draft_model is not None)
        return self.drafter or self.usual_drafter or default, self.drafter_options

    def result_of(self, request: Request, drafter: str, notes: Sequence[str]) -> GenerationResult:
        text = text_before(
            self.base.tokenizer,
            request.text_ids(request.token_ids),
            request.stop_position,
            prompt=request.prompt_ids,
        )
        deepest = max(request.depth_counts, default=0)
        at_least = [
            sum(n for depth, n in request.depth_counts.items() if depth >= d)
            for d in range(1, deepest + 1)
        ]
        attention = request.attention or self.verifier.attention
        stats = GenerationStats(
            drafter=drafter,
            drafter_notes=[*notes, *self._draft_cost_notes(request)],
            attention=attention.name,
            attention_fallbacks=list(attention.fallbacks),
            prompt_tokens=len(request.prompt_ids),
            new_tokens=len(request.token_ids),
            num_steps=request.num_steps,
            acceptance_length=(len(request.token_ids) - 1) / request.num_steps
            if request.num_steps
            else 1.0,
            acceptance_by_depth=[count / request.num_steps for count in at_least],
            seconds=request.seconds,
            tokens_per_second=len(request.token_ids) / request.seconds if request.seconds else 0.0,
            acceptance=request.sampler.params.acceptance,
            steps_run_by=request.steps_run_by,
            first_token_seconds=request.first_seconds,
            dtype=self.base.info.dtype,
            weights=self.weights,
            activations=self.activations,
            cache=self.cache,
            quantization=self.base.info.quantization,
            rounding_tolerance=self.rounding_tolerance,
            check_remembered=self.check.remembered,
            nodes_per_step=request.num_nodes / request.num_steps if request.num_steps else 1.0,
            cached_tokens=request.num_cached,
            near_ties=request.near_ties
            if request.counts_near_ties or not request.num_cached
            else None,
            padding_nodes=request.num_padding,
        )
        reason = request.finish_reason or "cancelled"
        scored = request.output_options.num_top_tokens is not None
        scores = request.token_scores if scored else None
        return GenerationResult(text, list(request.token_ids), reason, stats, scores)

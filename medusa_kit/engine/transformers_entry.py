"""`model.generate(**inputs, custom_generate=medusa_kit.custom_generate)`: decoding by this kit
inside transformers' own generate, for a model that is already loaded.

generate() prepares the request (settings, special tokens, mask) as usual and calls us. The answer
has the same shape and, greedily in float32, the same tokens. What we cannot honour is refused by
name (transformers_request.py).

The model stays the caller's: no layer is replaced, and attention is switched to tree attention only
during a call.

Shapes: B batch, T tokens of the padded prompts.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from medusa_kit.base import families
from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.base.model_state import watch_of
from medusa_kit.base.tokenizer.ids import check_token_ids
from medusa_kit.engine.before_loading import AnyTree
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.load import build_engine, with_heads
from medusa_kit.engine.transformers_request import check_request, unpadded
from medusa_kit.errors import ConfigError, ContextLengthError
from medusa_kit.heads import MedusaHeads
from medusa_kit.infer.attention import ATTENTION_NAME
from medusa_kit.infer.decode.accept.sampler import Sampler
from medusa_kit.infer.decode.node_choice.cost import LearnedSteps
from medusa_kit.infer.decode.request import Request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.locks import SharedLock, lock_of
from medusa_kit.settings.drafters import drafter_options
from medusa_kit.settings.sampling import SamplingParams
from medusa_kit.usual_device import on_usual_device

WITHOUT_HEADS = "auto"  # the drafter for a model that has no heads
ENGINES_ATTRIBUTE = "_medusa_kit_engines"  # attribute of a model under which its engines are kept


class CustomGenerate:
    """The function that generate() calls. An engine is built at the first call for a model and
    kept with the model."""

    def __init__(
        self,
        *,
        heads: str | Path | MedusaHeads | None = "auto",
        tree: AnyTree = None,
        drafter: str | None = None,
        options: Mapping[str, Any] | None = None,
        draft_model: str | BaseModel | None = None,
    ) -> None:
        if drafter is not None:
            drafter_options(drafter, options)  # mistakes are reported here, not in the first call
        elif options is not None:
            raise ConfigError("drafter options were given without a drafter", hint="name it")
        self.heads, self.tree, self.draft_model = heads, tree, draft_model
        self.drafter, self.options = drafter, options

    @on_usual_device
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        token_streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """token_ids_BT of prompts and answers, as generate() returns them.

        `token_streamer` is an argument of our own, since generate() does not pass `streamer`,
        `assistant_model` and `synced_gpus` on to a callable. So these can be neither honoured nor
        refused here.
        Raises ConfigError for what cannot be honoured, ContextLengthError, IncompatibleBaseError,
        ModelChangedError where the model changed meanwhile.
        """
        check_request(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
        if token_streamer is not None and len(input_ids) > 1:
            raise ConfigError(
                f"a token_streamer was given with {len(input_ids)} prompts; expected one",
                hint="sequences of a batch advance by different amounts",
            )
        prompts = unpadded(input_ids, model_kwargs.get("attention_mask"))
        engines = _engines_of(model)
        engine = engines.engine(model, self)
        new_tokens = generation_config.max_length - input_ids.shape[1]
        rows = _rows(engine, prompts, generation_config, new_tokens)
        name = self.drafter or ("medusa" if engine.heads is not None else WITHOUT_HEADS)
        drafter = engine.drafter_for(name, self.options, len(rows), rows[0].sampler.params)
        with engines.tree_attention(engine.base.own_model):
            if token_streamer is not None:
                token_streamer.put(input_ids.cpu())
            scheduler = Scheduler(engine.verifier, steps=engines.steps)
            for emitted in scheduler.run(rows, drafter):
                for _, tokens in emitted if token_streamer is not None else ():
                    for token in tokens:
                        token_streamer.put(torch.tensor([token]))
        if token_streamer is not None:
            token_streamer.end()
        return _joined(input_ids, [row.token_ids for row in rows], generation_config)


custom_generate = CustomGenerate()


def custom_generate_with(
    *,
    heads: str | Path | MedusaHeads | None = "auto",
    tree: AnyTree = None,
    drafter: str | None = None,
    options: Mapping[str, Any] | None = None,
    draft_model: str | BaseModel | None = None,
) -> CustomGenerate:
    """A `custom_generate` with settings of its own. Keep it: its engines live as long as it does.

    `heads`, `tree`: as for `medusa_kit.load`. `drafter`: a name from settings.drafters.DRAFTERS
    with its `options`; by default heads where there are any. `draft_model`: for drafters that use
    one. Raises ConfigError for a drafter or an option that does not exist.
    """
    return CustomGenerate(
        heads=heads, tree=tree, drafter=drafter, options=options, draft_model=draft_model
    )


class _Engines:
    """The engines of one model. They are an attribute of the model, so that they are freed with it.
    In a dictionary with weak keys each engine would keep its own key alive."""

    def __init__(self) -> None:
        self._plain: Engine | None = None
        self._number = 0  # of the model's changes before that was built
        self._by_entry: WeakKeyDictionary[CustomGenerate, Engine] = WeakKeyDictionary()
        self._lock = SharedLock()
        self.steps = LearnedSteps()
        self._calls = 0  # running now, in any thread
        self._attention = ""  # the model's own, while calls are running

    def engine(self, model: Any, entry: CustomGenerate) -> Engine:
        """The engine for these settings; all are rebuilt if the model has changed."""
        with self._lock:
            watch = watch_of(model)  # of the whole, where the engine's is a text part
            watch.hand_out(model)
            if self._plain is None or self._number != watch.look(model):
                self._by_entry.clear()
                self._plain = _built(model)
                self._number = watch.look(model)
            if entry not in self._by_entry:
                engine = with_heads(self._plain, entry.heads, tree=entry.tree)
                engine.draft_model = entry.draft_model
                self._by_entry[entry] = engine
            return self._by_entry[entry]

    @contextmanager
    def tree_attention(self, model: Any) -> Iterator[None]:
        """Overlapping calls switch it on once, until the last of them ends."""
        if not model._can_set_attn_implementation():  # an older class uses its own with our mask
            yield
            return
        with self._lock:
            if self._calls == 0:
                self._attention = model.config._attn_implementation
                model.set_attn_implementation(ATTENTION_NAME)
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if self._calls == 0:
                    model.set_attn_implementation(self._attention)

    def __deepcopy__(self, memo: Any) -> "_Engines":
        return _Engines()  # a copy of the model builds its own

    def __reduce__(self) -> tuple[Any, ...]:
        return _Engines, ()


def _engines_of(model: Any) -> _Engines:
    with lock_of(model):
        return vars(model).setdefault(ENGINES_ATTRIBUTE, _Engines())


def _built(model: Any) -> Engine:
    """Wrapping freezes a model; here it stays trainable, and keeps its attention, unless that
    leaves out a soft cap."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    attention = model.config._attn_implementation
    name = getattr(model, "name_or_path", "") or type(model).__name__
    try:
        return build_engine(wrap_model(model, None, name), keep_layers=True)
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)
        families.keep_soft_cap(model)


def _rows(engine: Engine, prompts: list[list[int]], config: Any, new_tokens: int) -> list[Request]:
    """Raises ConfigError for an id that the model has no row for; ContextLengthError: plain
    generate can run past the context's end, trees cannot."""
    for ids in prompts:
        check_token_ids(ids, engine.base.info.vocab_size)
    longest, context = max(len(ids) for ids in prompts), engine.base.info.context_length
    if longest + new_tokens > context:
        raise ContextLengthError(
            f"{longest} tokens of a prompt and {new_tokens} of an answer were asked for; the "
            f"model's context holds {context}",
            hint=f"max_new_tokens={max(context - longest, 0)} is the most for this prompt",
        )
    params = [SamplingParams()] * len(prompts)
    if config.do_sample:
        seeds = torch.randint(2**63 - 1, (len(prompts),)).tolist()  # torch.manual_seed governs
        params = [SamplingParams(config.temperature or 1.0, seed=seed) for seed in seeds]
    stops = config._eos_token_tensor
    stop_ids = frozenset(() if stops is None else stops.flatten().tolist())
    return [
        Request(
            prompt_ids=ids,
            sampler=_sampler(engine, ids, row_params, config, new_tokens),
            max_new_tokens=new_tokens,
            stop_ids=stop_ids,
        )
        for ids, row_params in zip(prompts, params, strict=True)
    ]


def _sampler(
    engine: Engine, ids: Sequence[int], params: SamplingParams, config: Any, new_tokens: int
) -> Sampler:
    """With generate's own processors for this row. Lengths in the settings include padding."""
    model, device = engine.base.own_model, engine.base.device
    config = copy.deepcopy(config)
    padding = config.max_length - new_tokens - len(ids)
    config.max_length -= padding
    config.min_length = max((config.min_length or 0) - padding, 0)
    processors = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(ids),
        encoder_input_ids=torch.tensor([list(ids)], device=device),
        device=device,
        model_kwargs={},
    )
    return Sampler(engine.base, params, ids, new_tokens, processors)


def _joined(input_ids_BT: Tensor, answers: list[list[int]], config: Any) -> Tensor:
    """Prompts as given, with answers padded by the padding token."""
    longest, padding = max(map(len, answers)), config._pad_token_tensor
    fill = 0 if padding is None else int(padding)  # without one no row ends before the others
    filled = [answer + [fill] * (longest - len(answer)) for answer in answers]
    return torch.cat([input_ids_BT, torch.tensor(filled).to(input_ids_BT)], dim=1)

"""Peers: other methods of decoding the same model faster, on the oracle's untouched copy.

A peer that cannot run here raises its reason when it is run; the bench then continues without it.

Shapes: T tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medusa_kit.base.model import BaseModel
from medusa_kit.bench.bench import Batch, Method
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.report import Answers, Decoding
from medusa_kit.errors import ConfigError, MedusaKitError, unknown_value
from medusa_kit.settings.sampling import SamplingParams

LOOKUP_TOKENS = 10  # transformers' own example value for prompt lookup
COMPILE_BACKEND = "inductor"
DEFAULT_PEERS = ("prompt-lookup",)
ONE_AT_A_TIME = "takes one prompt at a time"


@dataclass(frozen=True)
class PeerCase:
    """The task of every peer."""

    oracle: Oracle
    max_new_tokens: int
    sampling: SamplingParams
    batch_size: int = 1
    assistant: BaseModel | None = None


def named_peers(given: Sequence[str], assistant: str | None = None) -> list[str]:
    """Names of PEERS from `a,b` or several; `transformers` may be named, but is always measured.

    Raises ConfigError for an unknown peer, and for an assistant that is missing or not needed.
    """
    names = _split(given)
    known = ("transformers", *PEERS)
    for name in names:
        if name not in known:
            raise unknown_value("peer", name, known)
    if "assisted" in names and assistant is None:
        raise ConfigError(
            "the peer 'assisted' needs a smaller model to draft",
            hint="name it with --assistant MODEL or --draft-model MODEL",
        )
    if assistant is not None and not {"assisted", "flashspec"} & set(names):
        raise ConfigError(
            f"the assistant {assistant!r} would not be used",
            hint="add --peers assisted (or flashspec)",
        )
    return [name for name in dict.fromkeys(names) if name in PEERS]


def assistant_for(given: Sequence[str], assistant: str | None, other: str | None) -> str | None:
    """The assistant, else `other` where a peer requires one."""
    return assistant or (other if "assisted" in _split(given) else None)


def _split(given: Sequence[str]) -> list[str]:
    return [name.strip() for listed in given for name in listed.split(",") if name.strip()]


def transformers_method(case: PeerCase, name: str, **options: Any) -> Method:
    """transformers generate with these options."""

    def run(batch: Batch) -> Answers:
        clock = TokenClock()
        ids, seconds = case.oracle.generate_batch(
            batch,
            case.max_new_tokens,
            temperature=case.sampling.temperature,
            seed=case.sampling.seed,
            streamer=clock,
            **options,
        )
        return Answers(ids, seconds, decoding=clock.decoding(sum(map(len, ids))))

    return Method(name, run)


class TokenClock:
    """A streamer for transformers that only records when the first and the last tokens came."""

    def __init__(self) -> None:
        self._prompt_seen, self._first_tokens = False, 0
        self._first = self._end = 0.0

    def put(self, tokens: torch.Tensor) -> None:
        if self._prompt_seen and not self._first_tokens:
            self._first, self._first_tokens = time.perf_counter(), tokens.numel()
        self._prompt_seen = True  # the first call passes the prompt

    def end(self) -> None:
        self._end = time.perf_counter()

    def decoding(self, num_tokens: int) -> Decoding | None:
        """The time of an answer of `num_tokens` in all; None where transformers did not call it."""
        if not self._end:
            return None
        return Decoding(max(0, num_tokens - self._first_tokens), self._end - self._first)


def not_runnable(name: str, reason: str) -> Method:
    """A peer that cannot run here, for a known reason."""

    def run(batch: Batch) -> Answers:
        raise MedusaKitError(reason)

    return Method(name, run)


def prompt_lookup(case: PeerCase) -> Method:
    name = "transformers prompt lookup"
    if case.batch_size > 1:
        return not_runnable(name, f"transformers' prompt lookup {ONE_AT_A_TIME}")
    return transformers_method(case, name, prompt_lookup_num_tokens=LOOKUP_TOKENS)


def assisted(case: PeerCase) -> Method:
    """transformers' assisted generation, also across vocabularies (universal)."""
    assistant, base = case.assistant, case.oracle.base
    assert assistant is not None, "`named_peers` requires one"
    name = f"transformers assisted ({_short(assistant)})"
    if case.batch_size > 1:
        return not_runnable(name, f"transformers' assisted generation {ONE_AT_A_TIME}")
    options: dict[str, Any] = {"assistant_model": assistant.model}
    if assistant.config.vocab_size != base.config.vocab_size:  # as transformers tells them apart
        if assistant.tokenizer is None or base.tokenizer is None:
            return not_runnable(name, "the vocabularies differ, and a model has no tokenizer")
        options |= {"tokenizer": base.tokenizer, "assistant_tokenizer": assistant.tokenizer}
    return transformers_method(case, name, **options)


def compiled(case: PeerCase) -> Method:
    """torch.compile over a static cache, which transformers uses on a GPU by default."""
    from transformers import CompileConfig

    model = case.oracle.base.own_model
    config = CompileConfig(backend=COMPILE_BACKEND)
    config._compile_all_devices = True  # on a CPU too, where it is off by default
    options = {"cache_implementation": "static", "compile_config": config}
    inner = transformers_method(case, "transformers compiled", **options)

    def run(batch: Batch) -> Answers:
        answers = inner.run(batch)
        if not hasattr(model, "_compiled_call"):
            raise MedusaKitError(f"transformers does not compile {type(model).__name__} here")
        return answers

    return Method(inner.name, run)


def flashspec(case: PeerCase) -> Method:
    """The PyPI package of that name: prompt lookup, or with an assistant its own default mix."""
    name = f"flashspec ({_short(case.assistant) if case.assistant else 'prompt lookup'})"
    if case.batch_size > 1:
        return not_runnable(name, "flashspec batches prompts of one length only")
    base, built = case.oracle.base, list[Any]()

    def run(batch: Batch) -> Answers:
        if not built:
            built.append(_flashspec_engine(case))
        ids_1T = torch.tensor(batch, device=base.device)
        room = base.info.context_length - ids_1T.shape[1]
        start = time.perf_counter()
        result = built[0].generate(
            ids_1T,
            max_new_tokens=min(case.max_new_tokens, room),
            eos_token_ids=sorted(base.stop_token_ids),
        )
        tokens = result.output_ids[0, : result.n_tokens_generated].tolist()
        return Answers([tokens], time.perf_counter() - start)

    return Method(name, run)


def _short(model: BaseModel) -> str:
    return model.info.name.rstrip("/").rpartition("/")[2]


def _flashspec_engine(case: PeerCase) -> Any:
    try:
        import flashspec as package
        from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel
    except ImportError as error:
        missing = "is not installed (pip install flashspec)"
        raise MedusaKitError(
            f"flashspec {missing if error.name == 'flashspec' else f'does not load: {error}'}"
        ) from error
    base, assistant, temperature = case.oracle.base, case.assistant, case.sampling.temperature
    if assistant is not None and assistant.config.vocab_size != base.config.vocab_size:
        raise MedusaKitError("flashspec needs an assistant with the same vocabulary")
    place: tuple[Any, ...] = (base.device, base.dtype)
    drafter = NgramDrafter()
    strategy = {"drafter_strategy": "bandit", "bandit": package.BanditConfig(n_arms=1)}
    if assistant is not None:
        drafter = HuggingFaceDrafter(assistant.info.name, *place, model=assistant.model)
        strategy = {}
        if temperature > 0:
            drafter.set_temperature(temperature)
    config = package.FlashSpecConfig(
        device=str(base.device),
        dtype=base.info.dtype,
        sampling=package.SamplingConfig(temperature=temperature, seed=case.sampling.seed),
        **strategy,
    )
    target = TargetModel(base.info.name, *place, model=base.own_model)
    return package.SpeculativeEngine(config, [drafter], target)


PEERS: dict[str, Callable[[PeerCase], Method]] = {
    "prompt-lookup": prompt_lookup,
    "compiled": compiled,
    "assisted": assisted,
    "flashspec": flashspec,
}

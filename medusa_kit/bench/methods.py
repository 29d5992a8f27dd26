"""The decoding methods that a bench compares: transformers generate, peers, and ours."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from medusa_kit import console
from medusa_kit.base.model import BaseModel
from medusa_kit.bench.bench import Batch, Method
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.peers import DEFAULT_PEERS, PEERS, PeerCase, transformers_method
from medusa_kit.bench.report import (
    NO_DRAFTER,
    ONE_NODE,
    TRANSFORMERS,
    Answers,
    BenchReport,
    Decoding,
)
from medusa_kit.drafters.native.mtp_layers import layers_or_error
from medusa_kit.engine.engine import Engine
from medusa_kit.errors import ContextLengthError
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.settings.drafters import READ_HEADS, check_drafting
from medusa_kit.settings.sampling import SamplingParams


def named_drafters(given: Sequence[str], draft_model: str | None = None) -> list[str]:
    """Names of drafters from `a,b` or several. Raises ConfigError for one that cannot draft."""
    names = [name.strip() for listed in given for name in listed.split(",") if name.strip()]
    for name in names:
        check_drafting(name, None, draft_model is not None)
    return list(dict.fromkeys(names))


def standard_methods(
    engines: Mapping[str, Engine],
    oracle: Oracle | None,
    max_new_tokens: int,
    *,
    peers: Sequence[str] = DEFAULT_PEERS,
    drafters: Sequence[str] = (),
    assistant: BaseModel | None = None,
    sampling: SamplingParams | None = None,
    batch_size: int = 1,
) -> list[Method]:
    """transformers generate, the peers, our one-node decoding, and our drafters.

    `oracle`: None leaves out what runs on it, transformers generate and the peers. `peers`: names
    of PEERS, from `named_peers`. `drafters`: those to compare, from `named_drafters`; by default
    each engine's own. `sampling`: temperature and seed.
    """
    sampling, methods = sampling or SamplingParams(), list[Method]()
    if oracle is not None:
        case = PeerCase(oracle, max_new_tokens, sampling, batch_size, assistant)
        methods = [replace(transformers_method(case, TRANSFORMERS), kind="transformers")]
        methods += [PEERS[name](case) for name in peers]
    first = next(iter(engines.values()))
    methods.append(engine_method(ONE_NODE, first, max_new_tokens, sampling, drafter=NO_DRAFTER))
    for name, engine, drafter in _drafting(engines, drafters):
        methods.append(engine_method(name, engine, max_new_tokens, sampling, drafter))
    return methods


def _drafting(
    engines: Mapping[str, Engine], drafters: Sequence[str]
) -> Iterator[tuple[str, Engine, str | None]]:
    """(the method's name, engine, drafter or None for its own; by default also what the base brings
    along). For drafters that do not use heads, all engines are the same."""
    names: Sequence[str | None] = drafters
    if not names:
        names = [None, *_brought_along(next(iter(engines.values())))]
    for drafter in names:
        for index, (name, engine) in enumerate(engines.items()):
            used = drafter or engine.own_drafter
            if used == NO_DRAFTER or (index and used not in READ_HEADS):
                continue
            if drafter is None and engine.drafter is None and engine.heads is not None:
                yield name, engine, None
            else:
                yield f"{name if used in READ_HEADS else 'medusa-kit'}, {used}", engine, drafter


def _brought_along(engine: Engine) -> list[str]:
    """Drafters that need nothing but the base."""
    _, error = layers_or_error(engine.base, engine.memory)
    return [] if error else ["mtp"]


def engine_method(
    name: str,
    engine: Engine,
    max_new_tokens: int,
    sampling: SamplingParams,
    drafter: str | None = None,
) -> Method:
    """Our decoding, timed until the last row has finished.

    Every prompt is read whole, and what drafters learn is kept for this method alone, since others
    see the same prompts.
    """
    scheduler = Scheduler(engine.verifier, steps=engine.scheduler.steps)
    engine = replace(engine, memory=engine.memory.without_texts(), scheduler=scheduler)

    def run(batch: Batch) -> Answers:
        # As in transformers, no row of a batch may go on where the longest one cannot.
        room = engine.base.info.context_length - max(map(len, batch))
        results = engine.generate(
            batch,
            max_new_tokens=min(max_new_tokens, room),
            drafter=drafter,
            batch_size=len(batch),
            temperature=sampling.temperature,
            seed=sampling.seed,
        )
        seconds = max(result.stats.seconds for result in results)
        stats = [result.stats for result in results]
        later_tokens = sum(result.stats.new_tokens - 1 for result in results)
        decoding = Decoding(later_tokens, seconds - stats[0].first_token_seconds)
        return Answers([result.token_ids for result in results], seconds, stats, decoding)

    lossy, activations = bool(engine.lossy_by), engine.activations
    used = drafter or engine.own_drafter
    return Method(name, run, kind="ours", drafter=used, lossy=lossy, activations=activations)


def not_paying(report: BenchReport) -> list[str]:
    """Notes on our drafters that are slower than decoding one node a step."""
    if (plain := report.plain) is None:
        return []
    drafting = [result for result in report.ran if result.drafts]
    ratios = [(result, result.total.decoding_ratio(plain.total)) for result in drafting]
    return [
        f"{result.name} is not worth its cost here: {ratio:.2f} × the speed of plain decoding, at "
        f"{console.number(result.total.acceptance_length, '.2f')} tokens per step"
        for result, ratio in ratios
        if ratio is not None and ratio < 1
    ]


def check_room(base: BaseModel, prompts: Sequence[Sequence[int]]) -> None:
    """Raises ContextLengthError for a prompt that leaves no room, before anything is measured."""
    context = base.info.context_length
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) >= context:
            raise ContextLengthError(
                f"prompt {number} has {len(prompt)} tokens; the model's context holds {context} "
                "with the answer",
                hint="leave it out of the prompts, or shorten it",
            )

"""The ways of decoding that a bench compares: transformers generate, its peers, and ours."""

from collections.abc import Mapping, Sequence

from medusa_kit.base_model import BaseModel
from medusa_kit.bench.bench import Answers, Batch, Method
from medusa_kit.bench.oracle import Oracle
from medusa_kit.bench.peers import DEFAULT_PEERS, PEERS, PeerCase, transformers_method
from medusa_kit.errors import ContextLengthError
from medusa_kit.infer.engine import Engine
from medusa_kit.infer.sampling import SamplingParams


def standard_methods(
    engines: Mapping[str, Engine],
    oracle: Oracle,
    max_new_tokens: int,
    *,
    peers: Sequence[str] = DEFAULT_PEERS,
    assistant: BaseModel | None = None,
    sampling: SamplingParams | None = None,
    batch_size: int = 1,
) -> list[Method]:
    """transformers generate, the peers, our one-node decoding, and each engine's heads.

    `peers`: names of PEERS, as `named_peers` returns them. `sampling`: temperature and seed.
    """
    sampling = sampling or SamplingParams()
    case = PeerCase(oracle, max_new_tokens, sampling, batch_size, assistant)
    methods = [transformers_method(case, "transformers generate")]
    methods += [PEERS[name](case) for name in peers]
    first = next(iter(engines.values()))
    methods.append(
        engine_method("medusa-kit, one node", first, max_new_tokens, sampling, drafter="none")
    )
    for name, engine in engines.items():
        if engine.heads is not None:
            methods.append(engine_method(name, engine, max_new_tokens, sampling))
    return methods


def engine_method(
    name: str,
    engine: Engine,
    max_new_tokens: int,
    sampling: SamplingParams,
    drafter: str | None = None,
) -> Method:
    """Our decoding; the clock stops when the last row has finished."""

    def run(batch: Batch) -> Answers:
        # As transformers has it: no row of a batch may go on where the longest one cannot.
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
        return Answers([result.token_ids for result in results], seconds, stats)

    return Method(name, run, ours=True)


def check_room(base: BaseModel, prompts: Sequence[Sequence[int]]) -> None:
    """Raises ContextLengthError for a prompt that leaves no room, before anything is measured."""
    context = base.info.context_length
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) >= context:
            raise ContextLengthError(
                f"prompt {number} has {len(prompt)} tokens; the model's context holds {context}, "
                "answer included",
                hint="leave it out of the prompts, or shorten it",
            )

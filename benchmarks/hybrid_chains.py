"""What a chain of draft tokens gains on a model that carries a state, by how often they are right.

    python benchmarks/hybrid_chains.py --family lfm2 --right 0.7 --chain 4 --rounds 6

The model is random, of the shape of some 1B model. Its own plain answer is known beforehand, so a
drafter can be right as often as wanted; each round decodes the same prompt plain and with chains,
in turns. The ratio is of tokens a second behind the first token; 95 % interval over rounds.
"""

import argparse
import random
import statistics
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_kit import console
from medusa_kit.base.model import wrap_model
from medusa_kit.bench.interval import interval_of
from medusa_kit.engine.engine import Engine
from medusa_kit.engine.load import build_engine
from medusa_kit.infer.decode.drafter import Drafter, State
from medusa_kit.infer.decode.request import Request, make_request
from medusa_kit.infer.decode.scheduler import Scheduler
from medusa_kit.infer.forest import Forest
from medusa_kit.settings.engine import EngineOptions
from medusa_kit.settings.sampling import SamplingParams

VOCAB = 65_536
SHAPES: dict[str, dict[str, Any]] = {  # some 1B parameters each
    "qwen3_5_text": {
        "hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 24,
        "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 128,
        "linear_num_key_heads": 12, "linear_num_value_heads": 12, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "lfm2": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "block_auto_adjust_ff_dim": False,
        "layer_types": (["conv", "conv", "full_attention"] * 6)[:16],
    },
}  # fmt: skip


class RightNowAndThen(Drafter):
    """Guesses the known answer's next tokens, each right with a chance."""

    name = "right now and then"

    def __init__(self, answer: list[int], start: int, chain: int, right: float, seed: int) -> None:
        self.answer, self.start, self.right = answer, start, right
        self.num_nodes, self._random = 1 + chain, random.Random(seed)

    def propose(self, state: State) -> Forest:
        done = len(state.tokens[0]) - self.start + 1
        guesses = self.answer[done : done + self.num_nodes - 1]
        tokens = [t if self._random.random() < self.right else (t + 1) % VOCAB for t in guesses]
        nodes = [state.roots_B[0], *tokens]
        return Forest.chains([nodes], torch.device("cpu"))


def random_engine(family: str) -> Engine:
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, max_position_embeddings=4096, **SHAPES[family]
    )
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return build_engine(wrap_model(model, None, f"random {family}"), EngineOptions(heads=None))


def answered(engine: Engine, prompt: list[int], tokens: int, drafter: Drafter) -> Request:
    row = make_request(engine.verifier, prompt, SamplingParams(), tokens)
    for _ in Scheduler(engine.verifier).run([row], drafter):
        pass
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=SHAPES, default="qwen3_5_text")
    parser.add_argument("--right", type=float, default=0.7)
    parser.add_argument("--chain", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=6)
    asked = parser.parse_args()
    engine = random_engine(asked.family)
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(64)]
    plain = engine.drafter_for("none")
    truth = answered(engine, prompt, asked.tokens + asked.chain, plain).token_ids
    ratios, speeds, lengths = list[float](), {"plain": list[float](), "chains": list[float]()}, []
    for seed in range(asked.rounds):
        drafter = RightNowAndThen(truth, len(prompt), asked.chain, asked.right, seed)
        for name, one in (("plain", engine.drafter_for("none")), ("chains", drafter)):
            row = answered(engine, prompt, asked.tokens, one)
            assert row.token_ids == truth[: asked.tokens], "another answer than plain decoding's"
            speeds[name].append((asked.tokens - 1) / (row.seconds - row.first_seconds))
        lengths.append((asked.tokens - 1) / row.num_steps)
        ratios.append(speeds["chains"][-1] / speeds["plain"][-1])
    found = interval_of(ratios)
    spread = f"{found.low:.2f} to {found.high:.2f}" if found else "too few rounds"
    console.out.print(
        f"{asked.family}, {engine.base.info.num_parameters / 1e9:.2f}B, chain of {asked.chain}, "
        f"each guess right {asked.right:.0%}: {statistics.median(speeds['plain']):.2f} tokens/s "
        f"plain, {statistics.median(speeds['chains']):.2f} with chains "
        f"({statistics.mean(lengths):.2f} tokens a step): {statistics.median(ratios):.2f} x "
        f"({spread}); {engine.steps_run_by}"
    )


if __name__ == "__main__":
    main()

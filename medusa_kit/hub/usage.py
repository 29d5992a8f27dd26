"""The card's last part: how to decode with the heads, here and in other engines."""

import json
from collections.abc import Iterator

from medusa_kit.heads.config import HeadsConfig
from medusa_kit.heads.formats.engines import formats_for, how_to_train
from medusa_kit.heads.formats.vllm import NOT_TRACKED
from medusa_kit.hub.measured import Measured
from medusa_kit.hub.redact_paths import is_local
from medusa_kit.installing import from_nothing
from medusa_kit.settings.engine import OWN_MODELS
from medusa_kit.tree.candidate_tree import CandidateTree


def usage(
    measured: Measured, repository: str, revision: str | None, base: str | None
) -> Iterator[str]:
    """Yield commands to paste. `base`: the base's Hub id, where known."""
    config = measured.config
    heads = repository if revision is None else f"{repository}@{revision}"
    name = config.base_model_name
    own = name in OWN_MODELS or (name.endswith(".gguf") and "/" not in name and not is_local(name))
    model = name if own else base or "BASE"
    at = f', revision="{config.base_model_revision}"' if config.base_model_revision else ""
    yield "In a clone of medusa-kit:"
    yield _shell(*from_nothing(), f"medusa-kit chat --model {model} --heads {heads}")
    yield (
        "```python\nimport medusa_kit\n\n"
        f'engine = medusa_kit.load("{model}"{at}, heads="{heads}")\n'
        'print(engine.generate("Why is the sky blue?", max_new_tokens=128).text)\n```'
    )
    yield "### vLLM and Text Generation Inference"
    yield from _other_engines(measured, heads, base or model)


def _other_engines(measured: Measured, heads: str, base: str) -> Iterator[str]:
    config = measured.config
    formats = formats_for(config)
    if not formats:
        yield f"Not possible: {_why_not(config)}. To {how_to_train('vllm', base)}."
        return
    yield f"Both verify one draft token of each head, a chain{_compared_with_trees(measured)}."
    count = config.num_heads
    speculative = (
        f'{{"method": "medusa", "model": "heads-vllm", "num_speculative_tokens": {count}}}'
    )
    serve = f"vllm serve {base} --speculative-config '{speculative}'"
    if config.reduced_size is not None:
        serve += f" --model-loader-extra-config '{json.dumps(NOT_TRACKED)}'"
    pull = f"medusa-kit pull {heads} heads"
    convert = f"medusa-kit convert heads heads-vllm --to vllm --model {base}"
    yield _shell(pull, convert, serve)
    if "tgi" not in formats:
        yield (
            "Text Generation Inference: not possible, since its format has no room for a "
            f"vocabulary of {config.reduced_size:,} of {config.vocab_size:,} tokens."
        )
        return
    yield _shell(
        pull,
        f"medusa-kit convert heads heads-tgi --to tgi --model {base}",
        f"text-generation-launcher --model-id heads-tgi --speculate {count}",
    )


def _compared_with_trees(measured: Measured) -> str:
    """The end of the sentence on chains: how their acceptance compares with that of trees here."""
    unmeasured = "; it was not measured in them"
    if measured.plan is None:
        return f", so acceptance is lower there than with a tree{unmeasured}"
    tree = measured.plan.for_batch(1)
    if isinstance(tree, CandidateTree) and tree == CandidateTree.chain(tree.depth):
        return f", as above{unmeasured}"
    return f", so acceptance is lower there than with the tree above{unmeasured}"


def _why_not(config: HeadsConfig) -> str:
    alone = "and both engines know heads that read the hidden state alone"
    if config.kind != "medusa":
        return (
            f"these are `{config.kind}` heads, which read tokens besides the hidden state, {alone}"
        )
    return (
        f"each head has a matrix of its own for {config.reduced_size:,} tokens, which neither "
        "engine loads"
    )


def _shell(*lines: str) -> str:
    return "\n".join(["```sh", *lines, "```"])

"""The card's last part: how to decode with the heads, here and in other engines."""

from collections.abc import Iterator

from medusa_kit.hub.measured import Measured
from medusa_kit.hub.redact_paths import is_local
from medusa_kit.settings.engine import OWN_MODELS


def usage(
    measured: Measured, repository: str, revision: str | None, base: str | None
) -> Iterator[str]:
    """Commands to paste. `base`: the base's Hub id, where known."""
    config = measured.config
    heads = repository if revision is None else f"{repository}@{revision}"
    name = config.base_model_name
    own = name in OWN_MODELS or (name.endswith(".gguf") and not is_local(name))
    model = name if own else base or "BASE"
    at = f', revision="{config.base_model_revision}"' if config.base_model_revision else ""
    yield f"```sh\npip install medusa-kit\nmedusa-kit chat --model {model} --heads {heads}\n```"
    yield (
        "```python\nimport medusa_kit\n\n"
        f'engine = medusa_kit.load("{model}"{at}, heads="{heads}")\n'
        'print(engine.generate("Why is the sky blue?", max_new_tokens=128).text)\n```'
    )
    yield "### vLLM and Text Generation Inference"
    yield from _elsewhere(measured, heads, base or model)


def _elsewhere(measured: Measured, heads: str, base: str) -> Iterator[str]:
    config = measured.config
    if config.prefix_layers:
        yield (
            "Not possible: these heads read a prefix layer, a decoder layer over the whole text, "
            "and both engines know heads that read the hidden state alone."
        )
        return
    if config.kind != "medusa":
        yield (
            f"Not possible: these are `{config.kind}` heads, which read tokens besides the hidden "
            "state, and both engines know heads that read the hidden state alone."
        )
        return
    yield (
        "Both verify one guess of each head, a chain, so acceptance is lower there than with "
        + ("a tree" if measured.plan is None else "the tree above")
        + "; it was not measured in them."
    )
    count = config.num_heads
    speculative = (
        f'{{"method": "medusa", "model": "heads-vllm", "num_speculative_tokens": {count}}}'
    )
    lines = [
        f"medusa-kit pull {heads} heads",
        f"medusa-kit convert heads heads-vllm --to vllm --model {base}",
        f"vllm serve {base} --speculative-config '{speculative}'",
    ]
    yield "```sh\n" + "\n".join(lines) + "\n```"
    if config.projection == "reduced":
        yield (
            "Text Generation Inference: not possible, since its format has no room for a "
            f"vocabulary of {config.reduced_size:,} of {config.vocab_size:,} tokens."
        )
        return
    lines = [
        lines[0],
        f"medusa-kit convert heads heads-tgi --to tgi --model {base}",
        f"text-generation-launcher --model-id heads-tgi --speculate {count}",
    ]
    yield "```sh\n" + "\n".join(lines) + "\n```"

"""Which architectures of GGUF files are read, by their names in `general.architecture`.

The table of docs/models.md is made of the same; a test compares them.
"""

from medusa_kit.errors import CheckpointError, nearest

IN_CPP = ("llama", "qwen2", "qwen3", "gemma3")
TESTED = ("gemma2", "phi3", "qwen3moe", "lfm2")
# What transformers dequantises too, though no test here has loaded it.
UNTESTED = ("falcon", "gemma4", "gpt2", "gpt-oss", "minimax-m2", "nemotron", "qwen2moe", "stablelm",
            "starcoder2", "deci")  # fmt: skip
# Read from their own folders, though not from these files, which transformers does not dequantise.
OTHER_FORMS = ("falcon-h1", "glm-dsa", "granitehybrid", "kimi-linear", "lfm2moe", "llama4",
               "mamba2", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe",
               "qwen3next")  # fmt: skip
# Draft tokens cannot be verified on these, see families.py.
WITHOUT_TREES = {
    "mamba": "transformers reads several tokens at once only from the start of a text",
    "bloom": "its biases follow the order of slots, not position ids",
    "t5": "it has an encoder and is no causal language model on its own",
    "t5encoder": "it has an encoder and is no causal language model on its own",
}
READ = (*IN_CPP, *TESTED, *UNTESTED)


def check_architecture(name: str, architecture: str) -> None:
    """`name`: the file's. Raises CheckpointError for an architecture that is not read."""
    if architecture in READ:
        return
    if reason := WITHOUT_TREES.get(architecture):
        raise CheckpointError(
            f"{name} is of the architecture {architecture!r}, on which draft tokens cannot be "
            f"verified: {reason}",
            hint="docs/models.md lists the architectures that are read",
        )
    other = architecture in OTHER_FORMS
    close = None if other else nearest(architecture, READ, cutoff=0.8)
    raise CheckpointError(
        f"{name} is of the architecture {architecture!r}, which transformers does not dequantise; "
        f"expected one of {', '.join(sorted(READ))}",
        hint=f"is it {close!r}, and the file damaged?" if close
        else "load the same model from its folder of safetensors, or by its Hub id, instead; draft "
        "tokens are verified on it as chains or trees" if other
        else "load the original model's folder or Hub id instead",
    )  # fmt: skip

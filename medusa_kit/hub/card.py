"""The model card: what was measured and on what. Anything else is marked "not measured".

Figures come from files beside the heads (measured.py) and are rendered by figures.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_kit import console
from medusa_kit.base.own_models import FETCHED_MODELS
from medusa_kit.heads.config import HeadsConfig
from medusa_kit.heads.formats.engines import OWN_NAME, engines_for
from medusa_kit.hub.figures import acceptance, exactness, speed, tree
from medusa_kit.hub.measured import Measured
from medusa_kit.hub.redact_paths import redact_paths
from medusa_kit.hub.usage import usage
from medusa_kit.settings.engine import EMBEDDED_NAME
from medusa_kit.version import __version__

TAGS = ("medusa", "speculative-decoding", "medusa-kit")
KNOWN_BASES = {
    EMBEDDED_NAME: "HuggingFaceTB/SmolLM2-135M-Instruct",
    **{name: model.base for name, model in FETCHED_MODELS.items()},
}
READS = {
    "medusa": "the hidden state",
    "hydra": "the hidden state and every token of the path before its own",
    "recurrent": "the hidden state and every token of the path before its own, through one network "
    "that all heads share",
}


@dataclass(frozen=True)
class CardOptions:
    """What no file beside the heads says.

    `base_model`: the base's Hub id; `pictures`: PNGs to upload as well.
    """

    repository: str
    revision: str | None = None
    base_model: str | None = None
    license: str | None = None
    data_license: str | None = None
    pictures: Sequence[str] = ()

    def base_of(self, measured: Measured) -> str | None:
        """The base's id on the Hub, as far as known."""
        name = measured.config.base_model_name
        if self.base_model is not None or name in KNOWN_BASES:
            return self.base_model or KNOWN_BASES[name]
        return None if measured.base_is_local else name


def render_card(measured: Measured, options: CardOptions) -> str:
    """The text of README.md, beginning with its metadata."""
    sections = [
        f"---\n{_metadata(measured, options)}\n---",
        *_introduction(measured, options),
        "## Acceptance",
        *acceptance(measured),
        "## Speed",
        *speed(measured, options.pictures),
        "## Exactness",
        *exactness(measured),
        "## Tree",
        *tree(measured, options.pictures),
        "## Training",
        *_training(measured, options),
        "## Use",
        *usage(measured, options.repository, options.revision, options.base_of(measured)),
    ]
    return "\n\n".join(sections) + "\n"


def _metadata(measured: Measured, options: CardOptions) -> str:
    from huggingface_hub import ModelCardData

    base = options.base_of(measured)
    return ModelCardData(
        library_name="medusa-kit",
        pipeline_tag="text-generation",
        license=options.license or "unknown",
        base_model=base,
        base_model_relation=base and "adapter",
        tags=list(TAGS),
    ).to_yaml()


def _introduction(measured: Measured, options: CardOptions) -> Iterator[str]:
    config, base = measured.config, options.base_of(measured)
    name = redact_paths(config.base_model_name)
    link = f"[{base}](https://huggingface.co/{base})" if base else f"`{name}`"
    yield f"# {options.repository.rpartition('/')[2]}"
    yield (
        f"Medusa heads for {link}, made with medusa-kit: {config.num_heads} heads draft the next "
        "tokens, the base model checks all draft tokens in one pass, and "
        + (
            "the answer should have the base model's own words, which it did not always when it "
            "was verified (see Exactness)."
            if any(part.bugs for part in measured.verify.values())
            else "the answer has the base model's own words."
        )
    )
    if (measured.recipe or {}).get("stage") == "medusa2":
        yield (
            f"The base model was trained together with these heads (Medusa-2): they fit `{name}` "
            "as it came out of that run, not the original."
        )
    projection = f"`{config.projection}`" + (
        f", {config.reduced_size:,} of {config.vocab_size:,} tokens" if config.reduced_size else ""
    )
    revision = config.base_model_revision or "not recorded"
    rows = [
        ("base model", f"`{name}`" + (f" ({base})" if base not in (None, name) else "")),
        ("base revision", revision if revision == "not recorded" else f"`{revision}`"),
        ("base fingerprint", f"`{config.base_fingerprint}`"),
        ("base quantised while training", "yes" if config.base_quantized else "no"),
        ("heads", _heads(config)),
        ("kind", f"`{config.kind}`: a head reads {READS[config.kind]}"),
        ("projection to the vocabulary", projection),
        ("engines that load them", _engines(config)),
        ("weights, SHA-256", f"`{measured.weights_digest}`"),
        ("heads, digest", f"`{measured.heads_digest}`"),
        ("medusa-kit", f"{config.kit_version} (this card: {__version__})"),
    ]
    yield console.markdown(("", ""), rows)


def _engines(config: HeadsConfig) -> str:
    names = engines_for(config)
    return f"{names} alone" if names == OWN_NAME else f"{names}; others than ours after `convert`"


def _heads(config: HeadsConfig) -> str:
    if config.mlp_size is not None:
        return f"{config.num_heads}, of {config.num_blocks} shared block(s) of {config.mlp_size:,}"
    return f"{config.num_heads}, of {config.num_blocks} block(s) each"


def _training(measured: Measured, options: CardOptions) -> Iterator[str]:
    recipe = redact_paths(measured.recipe)
    license_line = options.data_license or "not recorded"
    if recipe is None:
        yield f"Recipe and training data: not recorded. Licence of the data: {license_line}."
        return
    sources = [
        source if isinstance(source, str) else source["source"]
        for source in recipe["data"]["sources"]
    ]
    train, versions = recipe["train"], (measured.provenance or {}).get("versions", {})
    rows = [
        ("training data", ", ".join(f"`{source}`" for source in sources)),
        ("licence of the data", license_line),
        ("stage", recipe["stage"]),
        ("epochs", _epochs(measured, train["epochs"])),
        ("loss", train["loss"]),
        ("learning rate", train["learning_rate"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    yield console.markdown(("", ""), rows)
    yield "The whole recipe, with what was asked for, is in [recipe.yaml](recipe.yaml)."


def _epochs(measured: Measured, planned_epochs: int) -> str:
    """The epochs that ran: training may end before `planned_epochs`, those of the recipe, do, and
    earlier heads may be the best."""
    ran = (measured.provenance or {}).get("ran") or {}
    updates, epochs = ran.get("updates"), ran.get("epochs")
    if epochs is None and measured.run is not None:
        updates, epochs = measured.run.get("num_updates"), _epochs_of(measured.run)
    if epochs is None:
        return f"not recorded; {planned_epochs} at most"
    return f"{epochs:.3g} ({updates:,} updates; {planned_epochs} at most by the recipe)"


def _epochs_of(run: dict[str, Any]) -> float | None:
    """The epochs of a run whose provenance does not name them, computed from its positions."""
    train = (run.get("recipe") or {}).get("train") or {}
    try:
        size = train["micro_batch_positions"] * train["accumulation"] * run["processes"]
        per_epoch = max(1, round(run["num_positions"] / size))
        return min(float(train["epochs"]), run["num_updates"] / per_epoch)
    except (KeyError, TypeError):
        return None

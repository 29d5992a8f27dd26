"""From a recipe and prepared rows to the parts of a run: module, feed and scorer.

Shapes: P positions, S likeliest tokens of the base.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from medusa_kit import console
from medusa_kit.base import adapters
from medusa_kit.base.files import lasting_name
from medusa_kit.base.fingerprint import SAME_MODEL, compare
from medusa_kit.base.model import BaseModel
from medusa_kit.base.tokenizer.encoding_digest import DIFFERS, Encodings
from medusa_kit.base.tokenizer.encoding_digest import compare as compare_encodings
from medusa_kit.data.answer_settings import how_encoded
from medusa_kit.errors import CheckpointError, ConfigError
from medusa_kit.heads import MedusaHeads, load_heads
from medusa_kit.heads.checkpoint import read_config, read_whole, says_ours
from medusa_kit.heads.config import HeadsConfig
from medusa_kit.heads.formats.files import local_heads_folder
from medusa_kit.heads.formats.recognise import read_foreign
from medusa_kit.settings.recipe import HeadsSection, TrainRecipe, TrainSection
from medusa_kit.train.batching import (
    Cutting,
    Feed,
    LiveFeed,
    StoredFeed,
    StoredPositions,
)
from medusa_kit.train.data import coverage, most_frequent_ids, on_all_tokens, stretch_contents
from medusa_kit.train.engine import Stage, TrainingEngine
from medusa_kit.train.evaluate import HeadScores, answer_starts, evaluate
from medusa_kit.train.features.cache import cached_positions, open_cache
from medusa_kit.train.features.features import (
    FeatureOptions,
    Positions,
    by_length,
    check_packing,
    collect_features,
    run_batches,
)
from medusa_kit.train.features.rows import HeadTargets
from medusa_kit.train.features.runners_up import check_runners_up
from medusa_kit.train.loss.loss import LossOptions
from medusa_kit.train.processes import distributed
from medusa_kit.train.stages import Medusa1, Medusa2, needs_original, original_top
from medusa_kit.train.states import check_states

SOFT_TOP = 32  # likeliest tokens kept for soft targets by default


@dataclass
class Run:
    """The parts of one run before an engine drives them."""

    module: Stage
    feed: Feed
    held_out: list[HeadTargets]  # longest first
    held_out_features: Positions | None  # None where the base is trained: then computed each time
    options: FeatureOptions
    chunk: int
    num_positions: int  # trained on in one epoch

    def scorer(self, engine: TrainingEngine | None) -> Callable[[], HeadScores]:
        """A function that scores the heads on the held-out rows, the same in every process. Without
        an engine all weights are whole."""
        heads, base = self.module.heads, self.module.heads.base
        starts, contents_A2 = answer_starts(self.held_out), stretch_contents(self.held_out)

        def score() -> HeadScores:
            self.module.eval()
            store = self.held_out_features
            if store is None:
                store = Positions.joined(list(run_batches(base, self.held_out, self.options)))
            # Gather after the base has run, since its forward releases what it gathered.
            needed = [*self.module.parameters_read_outside(), *heads.parameters()]
            with contextlib.nullcontext() if engine is None else engine.whole(needed):
                scores = evaluate(heads, store, self.chunk, starts, contents_A2)
            self.module.train()
            return scores

        return score


def feature_options(recipe: TrainRecipe, base: BaseModel) -> FeatureOptions:
    """How the base reads rows in this run."""
    train = recipe.train
    soft = 0
    if train.loss != "cross_entropy" and train.soft_top != "all":
        soft = min(train.soft_top or SOFT_TOP, base.info.vocab_size)
    return FeatureOptions(
        train.feature_batch_tokens, soft, train.packing, train.soft_top == "all", train.runners_up
    )


def trained_rows(training: Sequence[HeadTargets], recipe: TrainRecipe) -> Sequence[HeadTargets]:
    """These rows with the tokens that `data.train_on` names."""
    return on_all_tokens(training) if recipe.data.train_on == "all" else training


def prepare_run(
    base: BaseModel,
    training: Sequence[HeadTargets],
    held_out: Sequence[HeadTargets],
    recipe: TrainRecipe,
    heads: MedusaHeads | None = None,
) -> Run:
    """Build heads (unless given), module, features and feed. Raises as `train` does."""
    train, joint = recipe.train, recipe.stage == "medusa2"
    check_precision(base, train)
    check_states(base.config, recipe)
    options = feature_options(recipe, base)
    if train.features == "disk":
        open_cache(base, recipe, options)
    if train.packing:
        check_packing(base, training)
    if train.runners_up:
        check_runners_up(base, training)
    heads = heads or new_heads(base, training, recipe)
    training = trained_rows(training, recipe)
    positions = train.micro_batch_positions * train.accumulation * distributed.world()
    cutting = Cutting(positions, train.accumulation)
    held_out = by_length(held_out)
    plain = FeatureOptions(options.batch_tokens, 0, options.packing)
    module: Stage
    feed: Feed
    held_out_features: Positions | None = None
    if joint:
        module, feed = _joint(base, heads, training, recipe, cutting, options)
    else:
        held_out_features = collect_features(base, held_out, plain, "held-out features")
        feed = _medusa1_feed(base, training, recipe, cutting, options)
        module = Medusa1(heads, LossOptions.of(train))
    num_positions = sum(len(item.positions_P) for item in training)
    return Run(
        module, feed, held_out, held_out_features, plain, train.chunk_positions, num_positions
    )


def check_precision(base: BaseModel, train: TrainSection) -> None:
    """Autocast leaves tensors in float64 as they are."""
    if train.precision != "float32" and base.dtype == torch.float64:
        raise ConfigError(
            f"train.precision {train.precision!r} on a base in float64: its heads train in float64",
            hint="train.precision=float32 leaves products in the heads' own dtype",
        )


def _medusa1_feed(
    base: BaseModel,
    training: Sequence[HeadTargets],
    recipe: TrainRecipe,
    cutting: Cutting,
    options: FeatureOptions,
) -> Feed:
    features = recipe.train.features or "memory"
    if features == "live":
        return LiveFeed(base, training, cutting, options)
    store: StoredPositions
    if features == "disk":
        store = cached_positions(base, training, recipe, options)
    else:
        store = collect_features(base, training, options, "training features")
    return StoredFeed(store, cutting, options.soft_all)


def _joint(
    base: BaseModel,
    heads: MedusaHeads,
    training: Sequence[HeadTargets],
    recipe: TrainRecipe,
    cutting: Cutting,
    options: FeatureOptions,
) -> tuple[Medusa2, LiveFeed]:
    """Collects the original base's predictions before the base is made trainable."""
    joint, loss = recipe.joint_options, LossOptions.of(recipe.train)
    teacher = joint.teacher or ("cached" if joint.moves == "full" else "live")
    original = None
    if teacher == "cached" and needs_original(joint, loss):
        original = _original(base, training, original_top(joint, loss), options)
    if joint.moves == "full":
        base.model.requires_grad_(True)
    else:
        adapters.put_on(base.model, joint.lora)
    if joint.gradient_checkpointing:
        if not base.model.supports_gradient_checkpointing:
            raise ConfigError(
                f"joint.gradient_checkpointing: {base.info.model_type} does not support it",
                hint="joint.gradient_checkpointing=false",
            )
        _checkpoint_activations(base.model)
    module = Medusa2(Medusa1(heads, loss), base, joint)
    module.train()
    moving = sum(p.numel() for p in base.model.parameters() if p.requires_grad)
    console.note(f"{moving:,} weights of the base are trained ({joint.moves})")
    return module, LiveFeed(base, training, cutting, options, True, original)


def _checkpoint_activations(model: Any) -> None:
    """Uses the name that the installed transformers has for it."""
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _original(
    base: BaseModel, items: Sequence[HeadTargets], top: int, options: FeatureOptions
) -> dict[int, Positions]:
    """The original's predictions at every position of each item; only the likeliest tokens are
    kept."""
    order = sorted(range(len(items)), key=lambda i: -len(items[i].input_ids))
    top = min(top, base.info.vocab_size)
    kept_options = FeatureOptions(options.batch_tokens, top, options.packing)
    by_index, remaining = {}, iter(order)
    total = sum(len(item.positions_P) for item in items)
    num_bytes = total * top * 8
    console.note(f"the original's predictions: {num_bytes / 1e9:.3f} GB in memory")
    with console.progress("the original's predictions", total, unit="tok") as bar:
        for batch in run_batches(base, [items[i] for i in order], kept_options):
            done = 0
            while done < len(batch.ahead_PJ):
                index = next(remaining)
                size = len(items[index].positions_P)
                part = Positions(*(tensor[done : done + size].clone() for tensor in batch))
                by_index[index] = part._replace(hidden_PD=part.hidden_PD[:, :0].clone())
                done += size
            bar.advance(done)
    return by_index


def new_heads(base: BaseModel, training: Sequence[HeadTargets], recipe: TrainRecipe) -> MedusaHeads:
    """Untrained heads, or those of an earlier run.

    In float32 (float64 for a float64 base): small updates vanish in bfloat16.
    """
    options = recipe.heads
    if (earlier := recipe.train.heads_from) is not None:
        heads = load_heads(local_heads_folder(earlier), base, force=True)
        _check_same(heads.config, options, earlier)
        _adopt(heads, base)
        if (columns := heads.config.reduced_size) != options.reduced_size:
            console.note(f"the earlier heads have {columns:,} columns; they keep these")
        heads = heads.with_heads(options.num_heads).requires_grad_(True)
        heads.config = replace(heads.config, encoding=_learned_encoding(base, recipe))
        return heads.double() if base.dtype == torch.float64 else heads.float()
    ids_R = None
    if options.reduced_size is not None:
        ids_R = most_frequent_ids(list(training), options.reduced_size, base.stop_token_ids)
        share = coverage(list(training), ids_R)
        console.note(f"reduced projection: {len(ids_R):,} tokens, {share:.1%} of training targets")
    heads = untrained_heads(base, options, ids_R)
    heads.config = replace(heads.config, encoding=_learned_encoding(base, recipe))
    return heads


def _learned_encoding(base: BaseModel, recipe: TrainRecipe) -> str | None:
    """How all text is encoded that is trained on; None where some is otherwise or nobody knows."""
    sources = {entry.source for entry in recipe.data.entries()}
    differs = any(how_encoded(source, base.encoding) in DIFFERS for source in sources)
    return None if differs else base.encoding


def untrained_heads(
    base: BaseModel, options: HeadsSection, ids_R: torch.Tensor | None
) -> MedusaHeads:
    heads = MedusaHeads.for_base(
        base, options.num_heads, options.num_blocks, options.projection, ids_R, options.kind,
        options.mlp_size,
    )  # fmt: skip
    return heads.double() if base.dtype == torch.float64 else heads.float()


def _adopt(heads: MedusaHeads, base: BaseModel) -> None:
    """Make earlier heads those of this base, which may be one that was fine-tuned from theirs."""
    config, info = heads.config, base.info
    if compare(config.base_fingerprint, info.fingerprint) not in SAME_MODEL:
        console.note(
            f"the earlier heads are those of another base ({config.base_model_name!r}, fingerprint "
            f"{config.base_fingerprint}); they learn {info.name!r} from here on"
        )
    if compare_encodings(config.encoding, base.encoding) is Encodings.OTHER:
        console.note(
            "the earlier heads were trained on text that was tokenized differently; from here on "
            "they learn it as it is tokenized now"
        )
    heads.config = replace(
        config, base_model_name=lasting_name(info.name, info.source),
        base_model_revision=info.revision,
        base_model_type=info.model_type, base_fingerprint=info.fingerprint,
        base_quantized=info.quantized, encoding=base.encoding, base_config=base.computation,
    )  # fmt: skip


def check_earlier_heads(recipe: TrainRecipe) -> None:
    """Check before anything is loaded that the heads to go on from are there and of the recipe's
    shape, as far as their config says. Raises CheckpointError, ConfigError, HubError."""
    if (earlier := recipe.train.heads_from) is None:
        return
    folder = local_heads_folder(earlier)
    if says_ours(folder):
        _check_same(read_whole(folder), recipe.heads, earlier)
    elif says_ours(folder / "heads"):
        raise CheckpointError(
            f"train.heads_from: {earlier} is the folder of a run",
            hint=f"its heads are in {folder / 'heads'}",
        )
    elif read_foreign(folder) is None:
        read_config(folder)  # says what is missing


def _check_same(config: HeadsConfig, options: HeadsSection, source: str) -> None:
    """Raises ConfigError where heads of an earlier run are not those of the recipe."""
    names = ["num_heads", "num_blocks", "kind", "projection", "reduced_size"]
    if config.reduced_size and config.reduced_size < (options.reduced_size or 0):
        names.remove("reduced_size")  # their text had no more tokens
    with_further = options.num_heads + options.further_heads  # as that section's own run left them
    fewer, same = config.num_heads < options.num_heads, config.num_heads == with_further
    if config.kind == "recurrent" and (fewer or same):
        names.remove("num_heads")
    if options.mlp_size is not None:  # else whatever the earlier run took
        names.append("mlp_size")
    differing = [
        f"{name} is {earlier}; heads.{name} is {requested}"
        for name in names
        if (earlier := getattr(config, name)) != (requested := getattr(options, name))
    ]
    if differing:
        raise ConfigError(
            f"train.heads_from: in {source} {' and '.join(differing)}",
            hint="the section heads must be that of the run that trained them (recurrent heads may "
            "become more)",
        )

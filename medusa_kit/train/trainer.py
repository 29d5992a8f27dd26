"""Training: recipe -> base, encoded rows -> positions and targets -> feed -> updates -> results.

Medusa-1 leaves the base unchanged; Medusa-2 trains it too (stages.py has the losses).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_kit import console
from medusa_kit.base import adapters
from medusa_kit.base.files import stored_config
from medusa_kit.base.fingerprint import SAME_MODEL, compare
from medusa_kit.base.loading import load_base_model
from medusa_kit.base.model import BaseModel
from medusa_kit.base.placement import pick_device, stored_dtype
from medusa_kit.base.tokenizer.encoding_digest import DIFFERS, Encodings
from medusa_kit.data.answer_settings import (
    base_that_answered,
    how_encoded,
    rows_of,
    warn_of_other_rows,
)
from medusa_kit.data.chat import EncodedExample, check_ids, encode_rows
from medusa_kit.data.mix import check_sources, recipe_rows
from medusa_kit.data.template import rendered_on
from medusa_kit.data.without_template import tell_template
from medusa_kit.errors import ConfigError, MedusaKitError
from medusa_kit.settings.engine import FLOAT32
from medusa_kit.settings.recipe import TrainRecipe, resolved
from medusa_kit.train import preparation, quality, result
from medusa_kit.train.cpu_products import by_onednn
from medusa_kit.train.data import TOGETHER, prepare, split
from medusa_kit.train.engine import check_packages, check_precision, make_engine
from medusa_kit.train.evaluate import HeadScores
from medusa_kit.train.features.cache import check_cache
from medusa_kit.train.features.rows import HeadTargets
from medusa_kit.train.loop import Pace, TrainingLoop
from medusa_kit.train.needs import check_room
from medusa_kit.train.optimizer import check_optimizer
from medusa_kit.train.processes import distributed, sharded_base
from medusa_kit.train.quality import Quality
from medusa_kit.train.run import identity
from medusa_kit.train.run.folder import Checkpoint, RunFolder
from medusa_kit.train.run.tracking import RUN_ID, Tracking, check_tracking, tracked


@dataclass(frozen=True)
class TrainReport:
    """The results of a finished run."""

    heads_folder: Path  # for Medusa-2 inside the model's or adapter's folder
    num_updates: int
    num_positions: int  # training positions in one epoch
    seconds: float
    scores: HeadScores  # on held-out rows, after the last update
    best: float | None  # simulated acceptance length of the kept weights
    quality: Quality | None  # for Medusa-2: the new base against the original


def train(
    recipe: TrainRecipe,
    fresh: bool = False,
    self_check: Callable[[BaseModel], object] | None = None,
    load_frozen: Callable[..., BaseModel] = load_base_model,
    pace: Pace | None = None,
) -> TrainReport:
    """Train heads as `recipe` says, continuing from its checkpoint if there is one.

    `fresh` removes an older run's files from output_dir once this one begins. `self_check` is
    called with the base before any work, and raises where trees cannot be verified on it.
    `load_frozen`: in place of load_base_model where the base stays as it is. `pace`: may make do
    with fewer updates than the recipe's epochs have; a checkpoint keeps their number.

    Raises ConfigError (wrong recipe, output_dir in use), DataError (no usable rows), MedusaKitError
    (loss not finite, disk full).
    """
    recipe = resolved(recipe)
    device = own_device(recipe.base.device)
    folder = RunFolder(recipe)
    folder.check_own(fresh)
    check_recipe(recipe, device)
    check_sources(recipe.data)
    owns_group = distributed.start(device)
    try:
        with folder.locked():
            folder.open(fresh)
            with tracked(recipe, folder.earlier(RUN_ID)) as tracking:
                if sharded_base.loads_layerwise(recipe):
                    base: BaseModel = sharded_base.load(recipe, device)
                else:
                    base = load_base(recipe, device, load_frozen)
                if self_check is not None:
                    self_check(base)
                if distributed.is_main():
                    tell_template(base.tokenizer, base.info.name)
                with rendered_on(folder.first_date()):
                    examples = load_examples(base, recipe)
                with by_onednn(device):
                    return _train_heads(base, examples, recipe, folder, tracking, pace)
    finally:
        if owns_group:
            torch.distributed.destroy_process_group()


def check_recipe(recipe: TrainRecipe, device: torch.device) -> None:
    """Raises what a recipe alone tells against a run, before anything is loaded or written."""
    check_optimizer(recipe, device)
    check_precision(recipe)
    check_packages(recipe)
    preparation.check_earlier_heads(recipe)
    check_tracking(recipe)
    if recipe.train.features == "disk":
        check_cache(recipe)


def own_device(name: str) -> torch.device:
    """The recipe's device; with several processes on a machine each takes its own GPU."""
    device = pick_device(name)
    if device.type != "cuda" or distributed.world() == 1:
        return device
    if distributed.local_rank() >= torch.cuda.device_count():
        raise ConfigError(
            f"process {distributed.local_rank()} on this machine has no GPU of its own: there are "
            f"{torch.cuda.device_count()}",
            hint="start one process for each GPU, or add base.device=cpu",
        )
    return torch.device("cuda", distributed.local_rank())


def load_base(
    recipe: TrainRecipe,
    device: torch.device,
    load_frozen: Callable[..., BaseModel] = load_base_model,
) -> BaseModel:
    four_bit = recipe.stage == "medusa2" and recipe.joint_options.moves == "qlora"
    if four_bit:
        adapters.require_4bit(device.type)
    _note_smaller_dtype(recipe, device)
    options: dict[str, Any] = {
        "dtype": recipe.base.dtype, "device": str(device), "revision": recipe.base.revision
    }  # fmt: skip
    if recipe.stage == "medusa1" and not recipe.train.runners_up:  # a model of torch reads these
        if recipe.base.activations != FLOAT32:
            if load_frozen is load_base_model:
                raise ConfigError(
                    f"base.activations {recipe.base.activations!r} are those of steps in C++, and "
                    "load_base_model loads a model of torch",
                    hint="give load_frozen=medusa_kit.infer.cpu.packed_base.base_for_decoding",
                )
            options["text_activations"] = recipe.base.activations
        return load_frozen(recipe.base.model, **options)
    return load_base_model(recipe.base.model, **options, four_bit=four_bit)


def _note_smaller_dtype(recipe: TrainRecipe, device: torch.device) -> None:
    """Note that a smaller dtype would do: a recipe names its dtype, `auto` is for decoding only."""
    base = recipe.base
    if device.type != "cuda" or base.dtype != "float32" or recipe.stage != "medusa1":
        return
    config = stored_config(base.model, base.revision)
    stored = None if config is None else stored_dtype(config)
    if stored in (torch.bfloat16, torch.float16):
        name = str(stored).removeprefix("torch.")
        console.note(
            f"base.dtype is float32, but the checkpoint is in {name}: base.dtype={name} halves the "
            "memory and time of the base's forwards (heads train in float32 either way)"
        )


def load_examples(base: BaseModel, recipe: TrainRecipe) -> list[EncodedExample]:
    """The rows of the recipe's sources, encoded; reports cut and skipped rows on stderr."""
    data = recipe.data
    _warn_of_other_answers(base, recipe)
    length = min(data.max_length, base.info.context_length)
    examples, report = encode_rows(
        recipe_rows(data, recipe.seed), base.tokenizer, length, data.on_error, base.info.vocab_size
    )
    for note in (report.summary(length), *report.notes()):
        console.note(note)
    for line in report.skips():
        console.warn(line)
    return examples


def _warn_of_other_answers(base: BaseModel, recipe: TrainRecipe) -> None:
    """Warn of answers that another model wrote, or to prompts that were tokenized differently:
    heads draft best on text of their own base."""
    for source in dict.fromkeys(entry.source for entry in recipe.data.entries()):
        warn_of_other_rows(source)
        answered_by, encoding = base_that_answered(source), how_encoded(source, base.encoding)
        if answered_by is not None and (
            compare(answered_by, base.info.fingerprint) not in SAME_MODEL
        ):
            console.warn(
                f"{source} holds the answers of another base (fingerprint {answered_by}; "
                f"{base.info.name!r} has {base.info.fingerprint}): drafts will be accepted less "
                "often. `medusa-kit data generate` makes answers of this base"
            )
        elif encoding in DIFFERS and not rows_of(source).doubtful:
            holds = "holds" if encoding is Encodings.OTHER else "does not say whether it holds"
            console.warn(
                f"{source} {holds} answers to prompts that were tokenized with another tokenizer "
                f"or chat template than {base.info.name!r} has now: drafts may be accepted less "
                "often. The "
                "`medusa-kit data generate` that made it, run again, mends it"
            )


def train_heads(
    base: BaseModel,
    examples: Sequence[EncodedExample],
    recipe: TrainRecipe,
    fresh: bool = False,
    pace: Pace | None = None,
) -> TrainReport:
    """`train` for a base and rows that are already in memory."""
    recipe = resolved(recipe)
    folder = RunFolder(recipe)
    folder.check_own(fresh)
    check_recipe(recipe, base.device)
    preparation.check_precision(base, recipe.train)
    base.changes()  # hidden states of other weights that lie on disk are not its own
    with folder.locked(), by_onednn(base.device):
        folder.open(fresh)
        with tracked(recipe, folder.earlier(RUN_ID)) as tracking:
            return _train_heads(base, examples, recipe, folder, tracking, pace)


def _train_heads(
    base: BaseModel,
    examples: Sequence[EncodedExample],
    recipe: TrainRecipe,
    folder: RunFolder,
    tracking: Tracking,
    pace: Pace | None = None,
) -> TrainReport:
    for example in examples:
        check_ids(example.input_ids, base.info.vocab_size, example.row)
    torch.manual_seed(recipe.seed)  # new adapters are random, the same in every process
    checkpoint = folder.load()
    training, held_out = _split(prepare(examples, recipe.heads.num_heads), recipe, checkpoint)
    heads = preparation.new_heads(base, training, recipe)
    now = identity.identity_of(base, training, held_out, heads, recipe)
    if checkpoint is not None:
        identity.check(checkpoint.progress, now, recipe)
    elif not folder.finished:  # which --fresh would drop
        check_room(folder.path, recipe, heads, base.info.num_parameters)
    joint = recipe.stage == "medusa2"
    digest = None if joint else base.weights_digest()
    options = preparation.feature_options(recipe, base)
    before = quality.read(base, held_out, options) if joint else None
    run = preparation.prepare_run(base, training, held_out, recipe, heads)
    if isinstance(base, sharded_base.ShardedBase):
        base.hand_over()
    engine = make_engine(run.module, recipe, base.device)
    try:
        loop = TrainingLoop(
            engine, run.feed, recipe, folder, now, run.scorer(engine),
            lambda: result.keep(engine, base, recipe, folder, loop.ran()), pace, tracking,
        )  # fmt: skip
        torch.manual_seed(recipe.seed + distributed.rank())  # dropout
        loop.resume()
        heads_folder = result.heads_folder(recipe, folder)
        loop.check_kept(heads_folder)
        loop.updates()
        scores = loop.judge()
        after = None
        if before is not None:
            run.module.eval()
            parameters = run.module.parameters_read_outside()
            with loop.average.in_place():
                readings = quality.read(base, held_out, options, lambda: engine.whole(parameters))
            after = quality.compare(before, readings)
    finally:
        engine.close()
    if digest is not None and base.weights_digest() != digest:
        raise MedusaKitError(
            "training changed the weights of the frozen base model",
            hint="this is a bug in medusa-kit: please report it with the recipe",
        )
    if joint and recipe.joint_options.save_merged and distributed.is_main():
        console.note(f"merged model in {result.save_merged(recipe)}")
    report = TrainReport(
        heads_folder, loop.step, run.num_positions, loop.elapsed(), scores, loop.best, after
    )
    folder.finish(_summary(report, recipe, folder.origin, base, digest))
    return report


def _split(
    items: Sequence[HeadTargets], recipe: TrainRecipe, checkpoint: Checkpoint | None
) -> tuple[list[HeadTargets], list[HeadTargets]]:
    """(training, held out) as the run began: earlier versions had turns of one conversation, rows
    with the same turn or the same answer, or equal rows, on both sides."""
    options = (items, recipe.data.eval_fraction, recipe.seed)
    parts = split(*options)
    saved = None if checkpoint is None else checkpoint.progress.get(identity.DATA)
    if saved in (None, identity.rows_digest(parts[0])):
        return parts
    for together in TOGETHER[1:]:
        earlier = split(*options, together)
        if saved == identity.rows_digest(earlier[0]):
            return earlier
    return parts


def _summary(
    report: TrainReport,
    recipe: TrainRecipe,
    origin: dict[str, Any],
    base: BaseModel,
    digest: str | None,
) -> dict[str, Any]:
    return {
        **origin,
        "processes": distributed.world(),
        "base": base.info.as_dict(),
        "base_weights_before_and_after": digest,
        "recipe": recipe.model_dump(),
        "num_updates": report.num_updates,
        "num_positions": report.num_positions,
        "seconds": round(report.seconds, 1),
        "held_out": report.scores.as_dict(),
        "kept_acceptance_length": report.best,
        "base_quality": None if report.quality is None else report.quality.as_dict(),
    }

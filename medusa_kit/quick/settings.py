"""What --quick trains and how it answers: the one place for these constants."""

from pathlib import Path
from typing import Any

from medusa_kit.base.files import lasting_name
from medusa_kit.base.model import BaseModel
from medusa_kit.heads.checkpoint import read_config
from medusa_kit.heads.config import HeadsConfig
from medusa_kit.settings.quick import MadeFor
from medusa_kit.settings.recipe import TrainRecipe
from medusa_kit.train.cpu_products import fast_in_bfloat16

ANSWER_TOKENS = 192  # longest answer
ANSWER_BATCH = 48  # prompts answered together
EPOCHS, MAX_EPOCHS = 3.0, 5.0  # planned for; taken where prompts run out before the time does
ANSWERS, FEATURES = "answers.jsonl", "features"  # in the folder
COPY = "served.jsonl"  # there, of answers that the run was given
COLUMNS = 8192  # of a reduced projection; a smaller vocabulary is kept whole
MAX_LENGTH = 2048
EVAL_FRACTION = 0.02  # of the answers: checkpoints are compared on them
CPU_POSITIONS, GPU_POSITIONS = 512, 2048  # an update

HEADS: dict[str, Any] = {"kind": "recurrent", "num_heads": 4, "further_heads": 2, "num_blocks": 1}
# What other engines load: heads that read the hidden state alone, of one block, as every format
# takes it.
PLAIN_HEADS: dict[str, Any] = {"kind": "medusa", "num_heads": 4, "num_blocks": 1}
GOING_ON = 5.0e-4  # the learning rate from earlier heads: a quarter of TRAIN's
TRAIN: dict[str, Any] = {
    "learning_rate": 2.0e-3,
    "warmup_ratio": 0.05,
    "loss": "soft",
    "soft_share": 1.0,  # towards what the base would say, so that prompts teach too
    "soft_top": "all",
    "chunk_positions": 256,
    "features": "disk",
    "cache_dtype": "float16",
}


def update_positions(base: BaseModel) -> int:
    return CPU_POSITIONS if base.device.type == "cpu" else GPU_POSITIONS


def training_dtype(base: BaseModel) -> str:
    """The dtype of the base while hidden states are computed. Where a processor multiplies
    in 16 bits that takes a third of the time; the shipped heads were trained so (docs/LOG.md)."""
    on_cpu = base.device.type == "cpu" and base.info.dtype == "float32"
    return "bfloat16" if on_cpu and fast_in_bfloat16(base.device) else base.info.dtype


def recipe_for(
    base: BaseModel,
    folder: Path,
    engine: MadeFor = "kit",
    *,
    earlier: Path | None = None,
    epochs: int = 1,
    limit: int | None = None,
    **train: Any,
) -> TrainRecipe:
    """The recipe for the answers in `folder`, of heads for `engine`, or to go on from `earlier`
    heads; `limit`: rows read, `train`: more of that section."""
    heads = heads_for(engine, base.info.vocab_size)
    if earlier is not None:
        heads = section_of(read_config(earlier))
        train |= {"heads_from": str(earlier), "learning_rate": GOING_ON}
    paths = paths_in(folder)
    data = {**paths["data"], "max_length": MAX_LENGTH,
            "eval_fraction": EVAL_FRACTION, "limit": limit, "train_on": "all"}  # fmt: skip
    size = {"epochs": epochs, "micro_batch_positions": update_positions(base),
            "precision": "bfloat16" if fast_in_bfloat16(base.device) else "float32"}  # fmt: skip
    return TrainRecipe.model_validate(
        {
            "output_dir": paths["output_dir"],
            "base": {
                "model": lasting_name(base.info.name, base.info.source),
                "dtype": training_dtype(base),
                "device": base.info.device,
            },
            "heads": heads,
            "data": data,
            "train": {**TRAIN, **size, **paths["train"], **train},
            "deepspeed": {"enabled": False},  # one process, which torch alone trains as fast
        }
    )


def paths_in(folder: Path) -> dict[str, Any]:
    """The values of a recipe that are paths, for a run in `folder`."""
    return {
        "output_dir": str(folder / "run"),
        "data": {"sources": [str(folder / ANSWERS)]},
        "train": {"cache_dir": str(folder / FEATURES)},
    }


def section_of(config: HeadsConfig) -> dict[str, Any]:
    """The section `heads` of a recipe that goes on from heads of this config."""
    names = ("kind", "num_heads", "num_blocks", "mlp_size", "projection", "reduced_size")
    return {**{name: getattr(config, name) for name in names}, "save_dtype": "bfloat16"}


def heads_for(engine: MadeFor, vocab_size: int | None = None) -> dict[str, Any]:
    """The section `heads` of a recipe. Heads draft among the most frequent tokens where there are
    many, or it is not known how many there are, unless the engine has no room for such heads
    (docs/formats.md)."""
    heads = HEADS if engine == "kit" else PLAIN_HEADS
    if engine == "tgi" or (vocab_size is not None and vocab_size <= COLUMNS):
        return {**heads, "projection": "shared"}
    return {**heads, "projection": "reduced", "reduced_size": COLUMNS, "save_dtype": "bfloat16"}

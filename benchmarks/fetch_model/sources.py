"""Where a model's file can come from. A source leaves it in a folder of its own, and goes on there
with what an earlier run of it left."""

import shutil
from collections.abc import Callable
from pathlib import Path

from medusa_kit.base.hub_client import HubName, with_retries
from medusa_kit.base.own_models import FetchedModel, making
from medusa_kit.errors import CheckpointError

# Returns the file, which may be any other. Raises MedusaKitError where there is none, OSError.
Source = Callable[[FetchedModel, Path], Path]


def from_file(given: str, model: FetchedModel) -> Source:
    """A copy of a file that the user has, which stays as it is. Raises CheckpointError for one that
    is missing, or of another size."""
    path = Path(given).expanduser()
    if not path.is_file():
        raise CheckpointError(f"MODEL_FILE is {given}, and no file is there", hint="check the path")
    if (size := path.stat().st_size) != model.size:
        raise CheckpointError(
            f"MODEL_FILE is {given}, which has {size:,} bytes; {model.path.name} has "
            f"{model.size:,}",
            hint=by_hand(model),
        )

    def take(model: FetchedModel, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copyfile(path, folder / model.path.name))

    return take


def by_hand(model: FetchedModel) -> str:
    """What to do where no source has it."""
    return (
        f"download {model.path.name} from {model.repository} on the Hub and name it: "
        f"{making(model, 'FILE')}"
    )


def from_hub(model: FetchedModel, folder: Path) -> Path:
    """From the authors. The client goes on with what has arrived."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it tells of each of its attempts in two lines
    name, file = HubName(model.repository), model.path.name
    what = f"cannot fetch {file} from {name} on the Hub"
    return Path(
        with_retries(what, name, lambda: hf_hub_download(str(name), file, local_dir=folder))
    )

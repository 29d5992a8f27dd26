"""What `train --quick` may be asked to train heads for."""

from typing import Literal, get_args

MadeFor = Literal["kit", "vllm", "tgi"]
MADE_FOR: tuple[MadeFor, ...] = get_args(MadeFor)

"""That the sanitizers see what the kernels do; only under `make sanitize`."""

from support.kernels.packed_weights import *  # noqa: F403

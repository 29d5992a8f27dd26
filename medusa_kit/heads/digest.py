"""The digest of heads: their numbers, and the part of their config that says what they compute.

It is that of the numbers as they were stored, whatever dtype they are loaded in. Numbers count as
float32 has them, so a copy in a wider dtype has the same digest. Names of folders, of the base and
of versions are not in it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from medusa_kit.base.fingerprint import PIECE, version_of
from medusa_kit.base.quantization import raw_bytes
from medusa_kit.heads.config import HeadsConfig

VERSION = "1"
COMPUTED = ("kind", "num_heads", "num_blocks", "projection", "hidden_size", "vocab_size",
            "reduced_size", "mlp_size")  # fmt: skip


def heads_digest(config: HeadsConfig, tensors: Mapping[str, Tensor]) -> str:
    """The digest of heads with these tensors. 100 MB take 10 to 100 ms."""
    from xxhash import xxh3_128

    fields = asdict(config)
    digest = xxh3_128(json.dumps([fields[name] for name in COMPUTED]).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        for piece in tensor.detach().flatten().split(PIECE):
            digest.update(raw_bytes(piece.float() if piece.is_floating_point() else piece.long()))
    return f"{VERSION}:{digest.hexdigest()}"


class StoredDigest:
    """The digest of heads that were read from a file, for as long as they stay as they were."""

    def __init__(self, heads: nn.Module, digest: str) -> None:
        self._digest, self._versions = digest, _versions(heads)

    def of(self, heads: nn.Module) -> str | None:
        """None where a tensor has been written to since."""
        return self._digest if self._versions == _versions(heads) else None


def _versions(heads: nn.Module) -> list[Any]:
    tensors = [*heads.parameters(), *heads.buffers()]
    return [(tensor.data_ptr(), version_of(tensor)) for tensor in tensors]

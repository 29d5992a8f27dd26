"""Heads of several blocks for loaders that repeat one, and for those that make each.

Shapes: K heads, L blocks, B batch, V vocabulary.
"""

from pathlib import Path

import pytest
import torch
from support.engine_loaders import LOADERS, REPEATS_A_BLOCK
from support.foreign_folders import agree, dotted, fd_config, put, random_parts
from support.same_heads import FP32, base_in, base_matrix, hidden, logits_of, saved

from medusa_kit.errors import CheckpointError
from medusa_kit.heads import load_heads
from medusa_kit.heads.convert import convert


@pytest.mark.parametrize("to", LOADERS)
@pytest.mark.parametrize("L", [2, 3])
def test_blocks_that_are_the_same_reach_every_engine(tmp_path: Path, to: str, L: int) -> None:
    """As FasterDecoding's own trainer makes them. Where one differs, a loader that repeats a block
    would compute something else, and every other one gets each block."""
    parts = random_parts(2, L, tied=True)
    matrices, base = to != "fd-v2", base_in(FP32)
    tensors = dotted(parts, matrices=matrices)
    source = put(tmp_path / "in", fd_config(parts), medusa_lm_head=tensors)
    convert(source, tmp_path / "out", to, base_name="some/base")
    if not matrices:
        parts.matrices = [base_matrix()] * 2
    agree(LOADERS[to](tmp_path / "out", hidden(), base_matrix()), parts.logits(hidden()))
    for kind in ("weight", "bias"):
        other = tmp_path / kind
        changed = tensors | {f"1.0.linear.{kind}": tensors[f"1.0.linear.{kind}"] + 0.1}
        put(other / "in", fd_config(parts), medusa_lm_head=changed)
        if to in REPEATS_A_BLOCK:
            with pytest.raises(CheckpointError, match=f"head 1 has {L} different blocks"):
                convert(other / "in", other / "out", to, base=base, base_name="some/base")
            continue
        convert(other / "in", other / "out", to, base=base, base_name="some/base")
        loaded_KBV = LOADERS[to](other / "out", hidden(), base_matrix())
        agree(loaded_KBV, logits_of(load_heads(other / "in", base)))
        assert not torch.allclose(loaded_KBV, parts.logits(hidden()))


def test_five_heads_are_what_fasterdecoding_makes(tmp_path: Path) -> None:
    for K in (3, 5):
        source, _ = saved(tmp_path / f"{K}", K=K)
        _, written = convert(source, tmp_path / f"fd-{K}", "fd-v1", base_name="some/base")
        assert any("makes 5 heads" in note for note in written.notes) == (K != 5)

"""A run that was killed while it wrote its results goes on with all of one kind, or all of the
other, and takes none of its own files for a person's."""

import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support.killed import after_each_rename

from medusa_kit.heads import HeadsConfig, MedusaHeads
from medusa_kit.heads.checkpoint import read_whole
from medusa_kit.train import result
from medusa_kit.train.run.folder import RunFolder

STAGES = {"medusa1": {}, "medusa2": {"stage": "medusa2", "joint": {"moves": "full"}}}


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_was_killed_between_two_files_knows_them_for_its_own(
    tiny_base, make_recipe, stage, capsys
):
    base, recipe = tiny_base(), make_recipe(**STAGES[stage])
    folder, kept = RunFolder(recipe), result.heads_folder(recipe, RunFolder(recipe))
    folder.origin, folder.date = {"versions": {}}, "2026-11-28T12:00:00"

    def keep(number):
        torch.manual_seed(number)
        info = base.info
        config = HeadsConfig(number, 1, "shared", info.hidden_size, info.vocab_size, None,
                             info.name, None, info.model_type, info.fingerprint)  # fmt: skip
        heads = MedusaHeads(config, base)
        module = torch.nn.ModuleDict({"heads": heads})
        module.heads = heads
        engine = SimpleNamespace(module=module, whole=lambda _: nullcontext())
        result.keep(engine, base, recipe, folder)

    def before():
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.begin()
        keep(1)

    found = []
    for _ in after_each_rename(lambda: keep(2), before):
        for fresh in (False, True):
            folder.check_own(fresh)
        with folder.locked():
            found.append(read_whole(kept).num_heads)
        assert not list(kept.glob("*.whole"))
    assert found == sorted(found)
    assert set(found) == {1, 2}

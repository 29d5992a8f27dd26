"""Training on bases that carry a state: padded rows, gradients, adapters, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.hybrids import CHAINS, tiny_hybrid, tiny_hybrid_base
from support.small_engines import random_prompt
from support.tiny_models import tiny_base

from medusa_kit.base import adapters
from medusa_kit.data.chat import EncodedExample
from medusa_kit.errors import ConfigError
from medusa_kit.settings.recipe import BaseSection, LoraSection
from medusa_kit.train.data import prepare
from medusa_kit.train.features.rows import Rows
from medusa_kit.train.forecast.described import DescribedBase
from medusa_kit.train.states import check_states
from medusa_kit.train.trainer import train_heads

LENGTHS = (30, 17, 9, 4)  # across the chunks that Mamba layers read


def examples() -> list[EncodedExample]:
    return [
        EncodedExample(random_prompt(n, n), [place >= 1 for place in range(n)], n) for n in LENGTHS
    ]


@pytest.mark.parametrize("family", CHAINS)
def test_rows_side_by_side_have_the_hidden_states_of_each_alone(family: str) -> None:
    base, items = tiny_hybrid_base(family), prepare(examples(), 2)
    together_PD = Rows.of(items, base.device, packing=False).hidden_PD(base)
    alone = [Rows.of([item], base.device, packing=False).hidden_PD(base) for item in items]
    torch.testing.assert_close(together_PD, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # peft's, of fused experts
@pytest.mark.parametrize("family", CHAINS)
def test_adapters_on_all_layers_get_a_gradient(family: str) -> None:
    """But on those that Mamba's kernels read past, and on experts, which peft sees to."""
    model = tiny_hybrid(family)
    there = {name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    past = {
        f"{name}.out_proj"
        for name, one in model.named_modules()
        if hasattr(one, "A_log") and hasattr(one, "D")
    }
    adapters.put_on(model, LoraSection(rank=2))
    adapted = {
        name.rpartition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name
    }
    wanted = {name for name in there - past if "expert" not in name and name != "lm_head"}
    assert adapted & there - {"lm_head"} >= wanted
    assert past.isdisjoint(adapted)
    ids_1T = torch.tensor([random_prompt(25, 1)])
    torch.nn.functional.cross_entropy(model(ids_1T).logits[0, :-1], ids_1T[0, 1:]).backward()
    for name, parameter in model.named_parameters():
        if ".lora_B." in name and ".experts." not in name:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name


def test_targets_that_kernels_read_past_are_refused() -> None:
    with pytest.raises(ConfigError, match="'out_proj' is a layer whose weights Mamba's kernels"):
        adapters.put_on(tiny_hybrid("granitemoehybrid"), LoraSection(targets=["out_proj"]))
    adapters.put_on(tiny_hybrid("lfm2"), LoraSection(targets=["out_proj"]))  # no kernel does


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("train", "packing", True), ("train", "runners_up", True)],
)
def test_what_needs_attention_alone_is_refused_by_name(
    make_recipe: Any, section: str, name: str, value: Any
) -> None:
    more = {"train": {"soft_top": "all", "loss": "soft"}} if name == "runners_up" else {}
    sections = {"heads": {"kind": "hydra", "num_heads": 2}, **more}
    sections[section] = {**sections.get(section, {}), name: value}
    recipe = make_recipe(**sections)
    base = tiny_hybrid_base("lfm2")
    with pytest.raises(ConfigError, match=rf"{section}\.{name} .* on lfm2"):
        train_heads(base, examples() * 4, recipe)
    check_states(tiny_base("llama4").config, recipe)  # no state


def test_a_base_is_described_whose_file_leaves_out_its_layers(tmp_path: Path) -> None:
    """Nemotron-H says of each layer what it is, and not how many there are."""
    model = tiny_hybrid("nemotron_h")
    model.config.save_pretrained(tmp_path)
    for _ in range(2):  # read, then remembered
        base = DescribedBase(BaseSection(model=str(tmp_path)))
        assert base.info.num_layers == 3
        assert base.info.num_parameters == sum(p.numel() for p in model.parameters())

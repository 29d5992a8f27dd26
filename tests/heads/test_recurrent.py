"""Heads of kind `recurrent`: their formula, written out with numpy, and where they start from."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import VOCAB, tiny_base, tiny_model

from medusa_kit.base.model import BaseModel
from medusa_kit.drafters.heads import dynamic as dynamic_trees
from medusa_kit.drafters.heads import hydra
from medusa_kit.drafters.heads.dynamic import DynamicDrafter
from medusa_kit.drafters.heads.hydra import HydraDrafter
from medusa_kit.errors import ConfigError
from medusa_kit.heads import MedusaHeads
from medusa_kit.heads.blocks import Walk
from medusa_kit.heads.ranks import token_ranks
from medusa_kit.train.loss.loss import LossOptions, heads_loss
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.dynamic import DynamicTree
from medusa_kit.tuning.temperature import fit_temperatures

D, K = 32, 3


def made(base: BaseModel, random: bool = True, **options: Any) -> MedusaHeads:
    heads = MedusaHeads.for_base(base, K, kind="recurrent", **options)
    for parameter in heads.parameters() if random else ():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


def by_hand(heads: MedusaHeads, given: np.ndarray, path: list[int]) -> list[np.ndarray]:
    """z of each head for one row, in float64."""
    weights = {name: t.double().numpy() for name, t in heads.state_dict().items()}
    table = heads.base.model.get_input_embeddings().weight.detach().double().numpy()

    def rms(x: np.ndarray) -> float:
        return float(np.sqrt(np.mean(x * x)))

    hidden, prefix = given[:D], given[D:]
    state, found = hidden, []
    for k, token in enumerate(path):
        e = table[token]
        parts = [state / rms(state), prefix, e / rms(e)]
        u = weights["recurrent.input.weight"] @ np.concatenate(parts)
        for b in range(heads.config.num_blocks):
            of = {
                n: weights[f"recurrent.blocks.{b}.{n}.weight"] for n in ("norm", "w1", "w2", "w3")
            }
            n = u / np.sqrt(np.mean(u * u) + 1e-5) * of["norm"]
            gate = of["w1"] @ n
            u = u + of["w2"] @ (gate / (1 + np.exp(-gate)) * (of["w3"] @ n))
        found.append(u / rms(u) * rms(hidden) * weights["recurrent.gain"][k])
        state = u
    return found


@pytest.mark.parametrize("options", [{}, {"num_blocks": 2, "mlp_size": 20}],
                         ids=["plain", "two blocks"])  # fmt: skip
def test_every_step_follows_the_formula(options: dict[str, Any]) -> None:
    heads = made(tiny_base("llama", dtype=torch.float64), **options)
    given_XD = 5 * torch.randn(4, heads.config.hidden_size, dtype=torch.float64)
    path_XJ = torch.randint(3, VOCAB, (4, K + 1))
    with torch.no_grad():
        at_once = torch.stack(list(heads.transforms(given_XD, path_XJ)))
        alone = torch.stack([heads.transform(given_XD, k, path_XJ) for k in range(K)])
    assert torch.equal(at_once, alone)
    for x in range(4):
        expected = by_hand(heads, given_XD[x].numpy(), path_XJ[x, :K].tolist())
        # The embeddings' sizes are float32 numbers for any base.
        np.testing.assert_allclose(at_once[:, x].numpy(), expected, rtol=1e-6, atol=1e-6)


def test_all_heads_over_a_known_path_take_one_step_each(llama: BaseModel) -> None:
    heads, steps = made(llama), list[int]()
    assert heads.recurrent is not None
    heads.recurrent.register_forward_hook(lambda _, given, __: steps.append(given[2]))
    hidden_PD, ahead_PJ = torch.randn(5, D), torch.randint(3, VOCAB, (5, K + 1))
    for run in (
        partial(heads_loss, options=LossOptions()),
        partial(token_ranks, num_ranks=4),
        fit_temperatures,
    ):
        steps.clear()
        run(heads, hidden_PD, ahead_PJ)
        assert steps == list(range(K))


@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_untrained_ones_give_the_models_own_logits(family: str, projection: str) -> None:
    ids_R = torch.tensor([0, 3, 41, 95]) if projection == "reduced" else None
    base, model = tiny_base(family), tiny_model(family)
    heads = made(base, random=False, num_blocks=2, projection=projection, reduced_ids=ids_R)
    ids_BT, path_BTJ = torch.randint(3, VOCAB, (2, 6)), torch.randint(3, VOCAB, (2, 6, K))
    with torch.no_grad():
        expected_BTR = model(ids_BT).logits
        found = list(heads.transforms(base.hidden_states(ids_BT), path_BTJ))
        if ids_R is not None:
            expected_BTR = expected_BTR[..., ids_R]
        for k, z_BTD in enumerate(found):
            torch.testing.assert_close(heads.project(z_BTD, k), expected_BTR, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1e-3, 1e3], ids=["small", "large"])
def test_the_size_of_hidden_states_does_not_matter(llama: BaseModel, size: float) -> None:
    """No epsilon shows: the guesses of a base with small or large states are scaled as they are."""
    heads, hidden_XD, path_XJ = made(llama), torch.randn(4, D), torch.randint(3, VOCAB, (4, K))
    pairs = zip(heads.transforms(hidden_XD, path_XJ), heads.transforms(size * hidden_XD, path_XJ),
                strict=True)  # fmt: skip
    for z_XD, scaled_XD in pairs:
        torch.testing.assert_close(scaled_XD, size * z_XD, rtol=1e-4, atol=1e-4 * size)


def test_one_network_however_many_heads(llama: BaseModel) -> None:
    def trained(num_heads: int) -> int:
        heads = MedusaHeads.for_base(llama, num_heads, kind="recurrent")
        return sum(parameter.numel() for parameter in heads.parameters())

    assert trained(5) - trained(2) == 3 * D  # a gain for each


def test_units_are_those_of_the_bases_layers_unless_given(llama: BaseModel) -> None:
    assert made(llama).config.mlp_size == 48
    assert made(tiny_base("gpt2")).config.mlp_size == 4 * D  # its config names none
    assert made(llama, mlp_size=7).config.mlp_size == 7


def test_a_row_of_zeros_has_a_gradient(llama: BaseModel) -> None:
    heads, path_XJ = made(llama), torch.randint(3, VOCAB, (1, K))
    hidden_XD = torch.zeros(1, D, requires_grad=True)
    torch.stack(list(heads.transforms(hidden_XD, path_XJ))).sum().backward()
    parameters = list(heads.parameters())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in parameters)


def test_embeddings_of_another_size_than_the_hidden_states() -> None:
    base = tiny_base("llama")
    base.model.set_input_embeddings(torch.nn.Embedding(VOCAB, 20))
    heads = made(base)
    assert heads.state_dict()["recurrent.input.weight"].shape == (D, D + 20)
    with torch.no_grad():
        found = list(heads.transforms(torch.randn(2, D), torch.randint(3, VOCAB, (2, K))))
    assert [z_XD.shape for z_XD in found] == [(2, D)] * K


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "recurrent", "mlp_size": 0}, "mlp_size is 0, expected a whole number from 1 on"),
        ({"kind": "hydra", "mlp_size": 8}, "mlp_size is 8 with heads of kind 'hydra'"),
    ],
)
def test_sizes_that_cannot_be(llama: BaseModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MedusaHeads.for_base(llama, 2, **options)


class Forgetful(Walk):
    """Keeps no state, so that every head starts from the hidden state."""

    def __setattr__(self, name: str, value: Any) -> None:
        pass


TREE = CandidateTree.from_choices([[0], [1], [2], [0, 1], [2, 0], [2, 2], [2, 0, 0], [0, 1, 1]])


def test_drafts_take_one_step_for_each_depth(
    llama: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a static tree and of dynamic ones, to the drafts of heads that start anew each time."""
    heads = made(llama)
    steps: list[int] = []
    assert heads.recurrent is not None
    heads.recurrent.register_forward_hook(lambda module, given, _: steps.append(given[2]))
    hidden_BD, roots = torch.randn(3, heads.config.hidden_size), [3, 20, 41]
    static, dynamic = (
        HydraDrafter(heads, TREE),
        DynamicDrafter(heads, DynamicTree(12, (1.0, 1.0, 1.0), 8)),
    )

    def drafts() -> tuple[Any, Any]:
        steps.clear()
        with torch.no_grad():
            filled_BN = static.fill(hidden_BD, torch.tensor(roots))
        grown = dynamic.grow(hidden_BD, roots)
        return filled_BN.tolist(), [(tokens, parents) for tokens, parents, _ in grown]

    found = drafts()
    assert steps == [0, 1, 2] * 2
    for module in (hydra, dynamic_trees):
        monkeypatch.setattr(module, "Walk", Forgetful)
    assert drafts() == found
    assert steps == [0, 0, 1, 0, 1, 2] * 2


@pytest.mark.parametrize("projection", ["shared", "own"])
def test_more_heads_go_on_from_the_last_one(projection):
    """The heads that were there guess as before; a new one is the last one, a token further on."""
    base = tiny_base("llama")
    heads = made(base, projection=projection)
    more = heads.with_heads(K + 2)
    assert heads.double().with_heads(K + 2).state_dict()["recurrent.gain"].dtype == torch.float64
    heads.float()
    hidden_PD = torch.randn(4, D)
    path_PJ = torch.randint(0, VOCAB, (4, K + 2))
    for k in range(K + 2):
        z_PD = more.transform(hidden_PD, k, path_PJ)
        if k < K:
            assert torch.equal(z_PD, heads.transform(hidden_PD, k, path_PJ))
        last = min(k, K - 1)
        assert torch.equal(more.project(z_PD, k), heads.project(z_PD, last))
        expected = by_hand(more, hidden_PD[0].numpy(), path_PJ[0, : k + 1].tolist())[k]
        np.testing.assert_allclose(z_PD[0].detach().numpy(), expected, rtol=2e-4, atol=2e-4)
    gain_KD = more.state_dict()["recurrent.gain"]
    assert torch.equal(gain_KD[K:], gain_KD[K - 1 : K].expand(2, -1))

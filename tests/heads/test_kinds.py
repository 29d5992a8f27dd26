"""Untrained heads are the base's own output embedding; candidates come in the order of ranks."""

import itertools
from typing import Any

import pytest
import torch
from support.tiny_models import FAMILIES, VOCAB, tiny_base, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_kit.base.model import BaseModel, wrap_model
from medusa_kit.errors import ConfigError
from medusa_kit.heads import MedusaHeads, order
from medusa_kit.heads.config import Kind
from medusa_kit.heads.order import columns_by_key

REDUCED = torch.tensor([0, 3, 4, 10, 41, 50, 77, 95])
CLOSE = {"atol": 1e-5, "rtol": 1e-4}  # float32 products of other shapes


def make_heads(base: BaseModel, projection: str, num_heads: int = 3, **options: Any) -> MedusaHeads:
    ids_R = REDUCED if projection == "reduced" else None
    return MedusaHeads.for_base(base, num_heads, projection=projection, reduced_ids=ids_R,
                                **options)  # fmt: skip


def base_with_output_bias() -> tuple[BaseModel, Any]:
    """(base, another model of the same weights); Phi's output embedding has a bias."""
    config = AutoConfig.for_model(
        "phi", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        model.lm_head.bias.data.copy_(torch.linspace(-2, 2, VOCAB))
        models.append(model)
    return wrap_model(models[0]), models[1]


@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
@pytest.mark.parametrize("family", [*FAMILIES, "with-bias"])
def test_untrained_heads_give_the_models_own_logits(family: str, projection: str) -> None:
    """Scaled, capped, tied and biased ones included; the oracle is the model's own forward."""
    base, model = base_with_output_bias() if family == "with-bias" else (
        tiny_base(family), tiny_model(family))  # fmt: skip
    heads = make_heads(base, projection, num_heads=2, num_blocks=2)
    ids_BT = torch.randint(3, VOCAB, (2, 6))
    with torch.no_grad():
        expected_BTV = model(ids_BT).logits
        logits_KBTR = heads(base.hidden_states(ids_BT))
    if projection == "reduced":
        expected_BTV = expected_BTV[..., REDUCED]
    for logits_BTR in logits_KBTR:
        torch.testing.assert_close(logits_BTR, expected_BTV, **CLOSE)


@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
def test_forward_is_transform_then_project_head_by_head(llama: BaseModel, projection: str) -> None:
    heads = make_heads(llama, projection, num_blocks=2)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden_BD = torch.randn(5, 32)
    with torch.no_grad():
        logits_KBR = heads(hidden_BD)
        for k in range(3):
            alone_BR = heads.project(heads.transform(hidden_BD, k), k)
            torch.testing.assert_close(logits_KBR[k], alone_BR, **CLOSE)
    assert not torch.allclose(logits_KBR[0], logits_KBR[1])


def test_a_block_adds_the_silu_of_its_linear(llama: BaseModel) -> None:
    heads = make_heads(llama, "shared", num_heads=1)
    block = heads.blocks[0][0]
    torch.nn.init.normal_(block.linear.weight)
    torch.nn.init.normal_(block.linear.bias)
    x_XD = torch.randn(4, 32)
    inner_XD = x_XD @ block.linear.weight.T + block.linear.bias
    expected_XD = x_XD + inner_XD / (1 + torch.exp(-inner_XD))
    torch.testing.assert_close(heads.transform(x_XD, 0), expected_XD, **CLOSE)


def test_every_block_of_every_head_is_a_module_of_its_own(llama: BaseModel) -> None:
    heads = make_heads(llama, "shared", num_blocks=3)
    blocks = [block for head in heads.blocks for block in head]
    assert len(blocks) == len({id(block) for block in blocks}) == 9
    with torch.no_grad():
        heads.blocks[1][2].linear.bias.fill_(1.0)
    hidden_XD = torch.randn(2, 32)
    assert torch.equal(heads.transform(hidden_XD, 0), hidden_XD)
    assert torch.equal(heads.transform(hidden_XD, 2), hidden_XD)
    silu_of_one = 1 / (1 + torch.exp(torch.tensor(-1.0)))
    torch.testing.assert_close(heads.transform(hidden_XD, 1), hidden_XD + silu_of_one, **CLOSE)


@pytest.mark.parametrize(
    ("projection", "expected"), [("shared", 6), ("reduced", 6), ("own", 9)]
)  # weight and bias of 3 blocks; own projections come on top
def test_what_trains_belongs_to_the_heads_alone(
    llama: BaseModel, projection: str, expected: int
) -> None:
    heads = make_heads(llama, projection)
    parameters = list(heads.parameters())
    assert len(parameters) == expected
    assert all(parameter.requires_grad for parameter in parameters)
    of_the_base = {parameter.data_ptr() for parameter in llama.model.parameters()}
    assert of_the_base.isdisjoint(parameter.data_ptr() for parameter in parameters)
    assert not any(parameter.requires_grad for parameter in llama.model.parameters())


@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
def test_a_head_reads_exactly_the_tokens_of_its_kind(llama: BaseModel, kind: str) -> None:
    """Changing a token that a head reads changes its guess, changing any other does not."""
    heads = make_heads(llama, "shared", kind=kind, num_blocks=2)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden_XD, path_XJ = torch.randn(4, 32), torch.randint(3, VOCAB, (4, 4))
    for k in range(3):
        z_XD = heads.transform(hidden_XD, k, path_XJ)
        reads = []
        for j in range(4):
            other_XJ = path_XJ.clone()
            other_XJ[:, j] = (other_XJ[:, j] + 7) % VOCAB
            reads.append(not torch.equal(heads.transform(hidden_XD, k, other_XJ), z_XD))
        expected = 0 if kind == "medusa" else k + 1
        assert reads == [j < expected for j in range(4)]


def test_the_first_block_adds_the_silu_of_hidden_state_and_embeddings(llama: BaseModel) -> None:
    heads = make_heads(llama, "shared", num_heads=2, kind="hydra")
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden_D, path = torch.randn(32), [5, 9]
    table_VD = llama.model.get_input_embeddings().weight
    for k in range(2):
        read_ED = table_VD[path[: k + 1]]
        parts = [token_D / token_D.square().mean().sqrt() for token_D in read_ED]
        linear = heads.blocks[k][0].linear
        inner_D = linear.weight @ torch.cat([hidden_D, *parts]) + linear.bias
        expected_1D = (hidden_D + inner_D * torch.sigmoid(inner_D))[None]
        actual_1D = heads.transform(hidden_D[None], k, torch.tensor([path]))
        torch.testing.assert_close(actual_1D, expected_1D, **CLOSE)


@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
def test_candidates_after_a_path_are_those_of_a_sort(llama: BaseModel, projection: str) -> None:
    heads = make_heads(llama, projection, kind="hydra")
    for block in heads.blocks.parameters():
        torch.nn.init.normal_(block, std=0.3)
    token_ids = torch.arange(VOCAB) if projection != "reduced" else REDUCED
    hidden_BQD, path_BQJ = torch.randn(2, 3, 32), torch.randint(3, VOCAB, (2, 3, 2))
    ids_BQC = heads.candidates_after(1, hidden_BQD, path_BQJ, 4)
    assert ids_BQC.shape == (2, 3, 4)
    for b in range(2):
        for q in range(3):
            alone = heads.transform(hidden_BQD[b, q][None], 1, path_BQJ[b, q][None])
            order = heads.project(alone, 1)[0].argsort(descending=True, stable=True)
            assert ids_BQC[b, q].tolist() == token_ids[order[:4]].tolist()


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-99, 100, shape).float()


def heads_with_ties(projection: str) -> MedusaHeads:
    """All rows of the output embedding appear three times, so that every logit has equals.

    All numbers are whole, so that equal rows give equal logits in any order of summing.
    """
    model = tiny_model("llama")
    model.lm_head.weight.data.copy_(whole_numbers(32, 32).repeat(3, 1))
    return make_heads(wrap_model(model), projection)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("projection", ["shared", "own", "reduced"])
def test_candidates_are_sorted_by_logit_then_token_id(
    llama: BaseModel, projection: str, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = heads_with_ties(projection) if ties else make_heads(llama, projection)
    hidden_BD = whole_numbers(20, 32) if ties else torch.randn(20, 32)
    if not ties:
        for block in heads.blocks:
            torch.nn.init.normal_(block[0].linear.weight, std=0.3)
    token_ids = REDUCED.tolist() if projection == "reduced" else list(range(VOCAB))
    with torch.no_grad():
        logits_KBR = heads(hidden_BD).tolist()
    for count, on_cpu in itertools.product((1, 2, 5, 8), (True, False)):
        monkeypatch.setattr(order, "may_look", lambda _, on_cpu=on_cpu: on_cpu)
        ids_KBC = heads.candidates(hidden_BD, count).tolist()
        for k in range(3):
            for row in range(20):
                pairs = zip(logits_KBR[k][row], token_ids, strict=True)
                best = [token for _, token in sorted(pairs, key=lambda p: (-p[0], p[1]))]
                assert ids_KBC[k][row] == best[:count]


def test_ties_really_occur_in_the_test_above() -> None:
    ids_KBC = heads_with_ties("shared").candidates(whole_numbers(4, 32), 6)
    first_KB, second_KB, third_KB = ids_KBC[..., 0], ids_KBC[..., 1], ids_KBC[..., 2]
    assert torch.equal(second_KB, first_KB + 32)
    assert torch.equal(third_KB, first_KB + 64)


def test_the_last_candidate_is_the_smallest_of_equal_ids(llama: BaseModel) -> None:
    """No two chosen ones are equal, but the last has equals that are not chosen."""
    llama.output_embedding.weight.data.zero_()
    hidden_1D = torch.randn(1, 32)
    for token, size in ((50, 3.0), (60, 2.0), (70, 1.0)):
        llama.output_embedding.weight.data[token] = size * hidden_1D[0]
    heads = make_heads(llama, "shared", num_heads=1)
    for count, expected in ((3, [50, 60, 70]), (4, [50, 60, 70, 0]), (6, [50, 60, 70, 0, 1, 2])):
        assert heads.candidates(hidden_1D, count)[0, 0].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_columns_by_key_order_every_number(dtype: torch.dtype) -> None:
    logits_XR = torch.randn(3, 40).round(decimals=1).to(dtype)
    special = [0.0, -0.0, 0.0, torch.inf, -torch.inf, torch.finfo(dtype).max, -1e-7, 1e-7]
    logits_XR[:, 5:13] = torch.tensor(special, dtype=dtype)
    expected = logits_XR.argsort(dim=-1, descending=True, stable=True)
    for count in (1, 7, 40):
        assert torch.equal(columns_by_key(logits_XR, count), expected[:, :count])


def test_a_shallow_tree_asks_the_first_heads_only(llama: BaseModel) -> None:
    heads, hidden_BD = make_heads(llama, "reduced"), torch.randn(3, 32)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    all_KBC = heads.candidates(hidden_BD, 5)
    assert len(all_KBC) == heads.num_heads > 2
    assert torch.equal(heads.candidates(hidden_BD, 5, first=2), all_KBC[:2])


def test_columns_of_token_ids(llama: BaseModel) -> None:
    reduced = make_heads(llama, "reduced")
    token_ids = torch.tensor([[0, 3, 5], [95, -1, 10]])
    assert reduced.to_columns(token_ids).tolist() == [[0, 1, -1], [7, -1, 3]]
    assert reduced.num_columns == 8
    assert torch.equal(reduced.column_ids, REDUCED)
    shared = make_heads(llama, "shared")
    assert torch.equal(shared.to_columns(token_ids), token_ids)
    assert (shared.num_columns, shared.column_ids) == (VOCAB, None)


def test_the_config_names_the_base(llama: BaseModel) -> None:
    config = make_heads(llama, "reduced", num_blocks=2).config
    assert (config.num_heads, config.num_blocks, config.projection) == (3, 2, "reduced")
    assert (config.hidden_size, config.vocab_size, config.reduced_size) == (32, VOCAB, 8)
    assert (config.base_model_name, config.base_model_type) == ("tiny-llama", "llama")
    assert config.base_fingerprint == llama.info.fingerprint
    assert config.kind == "medusa"


BAD = {
    "unknown kind": ({"kind": "eagle"}, "'eagle' is unknown; expected one of medusa, hydra"),
    "no head": ({"num_heads": 0}, "num_heads=0"),
    "no block": ({"num_blocks": 0}, "num_blocks=0"),
    "unknown projection": ({"projection": "tied"}, "'tied' is unknown; expected one of shared"),
    "reduced without ids": ({"projection": "reduced"}, "no reduced ids"),
    "ids without reduced": ({"reduced_ids": REDUCED}, "given reduced ids"),
    "no ids": ({"projection": "reduced", "reduced_ids": REDUCED[:0]}, "ascending, unique"),
    "unsorted": ({"projection": "reduced", "reduced_ids": REDUCED.flip(0)}, "ascending, unique"),
    "twice": ({"projection": "reduced", "reduced_ids": torch.tensor([1, 1])}, "ascending, unique"),
    "negative": ({"projection": "reduced", "reduced_ids": torch.tensor([-1, 1])}, r"0\.\.95"),
    "too large": ({"projection": "reduced", "reduced_ids": torch.tensor([1, 96])}, r"0\.\.95"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_heads_that_cannot_be_are_refused(llama: BaseModel, case: str) -> None:
    options, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        MedusaHeads.for_base(llama, **options)


@pytest.mark.parametrize("kind", ["hydra", "recurrent"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_token_whose_embedding_is_zeros(kind: Kind, dtype: torch.dtype) -> None:
    """As that of a padding token is."""
    base = tiny_base("llama", dtype=dtype)
    with torch.no_grad():
        base.model.get_input_embeddings().weight[3] = 0
    heads = MedusaHeads.for_base(base, 2, kind=kind)
    path_XJ = torch.full((1, 2), 3)
    with torch.no_grad():
        found = torch.stack(list(heads.transforms(torch.randn(1, 32, dtype=dtype), path_XJ)))
    assert found.isfinite().all()

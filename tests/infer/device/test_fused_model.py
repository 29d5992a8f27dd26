"""Weights that are joined stay the modules' own, and the switch, the check and the way back."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attention_inputs import needs_triton
from support.fused import (
    fused_base,
    fused_model,
    fused_verifier,
    random_tokens,
    read_by_torch,
    trees_of,
)
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import tiny_base
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from medusa_kit.base.model import BaseModel
from medusa_kit.infer import model_parts
from medusa_kit.infer.attention.choice import AttentionChoice
from medusa_kit.infer.device import fused_forward
from medusa_kit.infer.device import fused_model as fused
from medusa_kit.infer.device.fused_model import EXACT, FAST, FusedModel, joined
from medusa_kit.infer.device.verifier import CapturedVerifier
from medusa_kit.infer.model_parts import Unsupported
from medusa_kit.infer.renewal import up_to_date
from medusa_kit.infer.verifier import Verifier
from medusa_kit.tree.candidate_tree import CandidateTree
from medusa_kit.tree.shape import chain

pytestmark = needs_triton
TOKENS = random_tokens(4, 3)


def logits_of(verifier: CapturedVerifier) -> Tensor:
    cache = verifier.new_cache(1, 64)
    nodes = trees_of([chain(4).parents], verifier.base.device)
    return verifier.score(cache, nodes, [0]).logits_NV


def plain_of(model: Any) -> Tensor:
    tokens = trees_of([chain(4).parents], model.device).token_lists()
    with torch.no_grad():
        return model(torch.tensor(tokens, device=model.device), use_cache=False).logits[0]


def first_attention(base: BaseModel) -> Any:
    return base.model.model.layers[0].self_attn


def test_the_modules_weights_are_views_and_no_change_of_the_model() -> None:
    base = fused_base("qwen2")
    before = {name: one.clone() for name, one in base.model.state_dict().items()}
    number, attention = base.changes(), first_attention(base)
    layer = FusedModel.of(base).layers[0]
    assert base.changes() == number
    for name, tensor in base.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    query, key = attention.q_proj.weight, attention.k_proj.weight
    assert query.data_ptr() == layer.qkv.weight_NK.data_ptr()
    assert key.data_ptr() == layer.qkv.weight_NK[len(query) :].data_ptr()
    assert layer.qkv.bias_N is not None
    assert attention.v_proj.bias.data_ptr() == layer.qkv.bias_N[len(query) + len(key) :].data_ptr()
    again = FusedModel.of(base).layers[0]
    assert again.qkv.weight_NK.data_ptr() == layer.qkv.weight_NK.data_ptr()  # nothing is copied


def test_saved_and_copied_models_are_whole(tmp_path: Path) -> None:
    base = fused_base("llama", tie_word_embeddings=True)
    expected = plain_of(base.model)
    FusedModel.of(base)
    base.model.save_pretrained(tmp_path)
    for model in (AutoModelForCausalLM.from_pretrained(tmp_path), copy.deepcopy(base.model)):
        torch.testing.assert_close(plain_of(model.to(base.device)), expected)
        tied = model.get_input_embeddings().weight
        assert tied.data_ptr() == model.get_output_embeddings().weight.data_ptr()


def test_what_is_written_through_modules_is_read() -> None:
    """As peft merges adapters, and as training updates weights."""
    base = fused_base("llama")
    verifier = fused_verifier(base)
    with torch.no_grad():
        first_attention(base).q_proj.weight.data.add_(0.1)
        base.model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    torch.testing.assert_close(logits_of(verifier), plain_of(base.model), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("inference", [False, True])
def test_weights_can_be_trained_on(inference: bool) -> None:
    base = fused_base("llama")
    with torch.inference_mode(inference):
        FusedModel.of(base)
    query = first_attention(base).q_proj.weight
    assert not query.is_inference()
    assert query.is_leaf
    query.requires_grad_(True)
    first_attention(base).q_proj(torch.ones(1, 32, device=base.device)).sum().backward()
    assert query.grad is not None


def test_under_autocast_torch_runs_the_model() -> None:
    base = fused_base("llama")
    verifier = fused_verifier(base)
    cache, nodes = verifier.new_cache(1, 64), trees_of([chain(4).parents], base.device)
    with torch.autocast(base.device.type, torch.bfloat16):
        rounded = verifier.score(cache, nodes, [0]).logits_NV.float()
        expected = plain_of(base.model).float()
    torch.testing.assert_close(rounded, expected, atol=0.05, rtol=0.05)
    assert (verifier.num_captured, verifier.num_loose) == (0, 1)
    assert "under autocast" in verifier.steps_run_by


def test_trees_fit_up_to_the_last_slot() -> None:
    """No room for padding is needed."""
    base = fused_base("llama")
    verifier = fused_verifier(base)
    cache = verifier.new_cache(2, 300)
    room = cache.num_positions
    read_by_torch(verifier, cache, [0], [random_tokens(room - 2, 4)])
    nodes = trees_of([chain(2).parents], base.device)
    expected = Verifier.score(verifier, cache, nodes, [0]).logits_NV
    scored = verifier.score(cache, nodes, [0]).logits_NV
    torch.testing.assert_close(scored, expected, atol=2e-5, rtol=1e-4)
    assert verifier.num_captured == 1


@pytest.mark.slow
def test_a_replaced_weight_is_noticed_and_joined_anew() -> None:
    base = fused_base("llama")
    verifier = CapturedVerifier(base, AttentionChoice(fixed_shapes=True))
    verifier.fuse(FAST)
    up_to_date(verifier)
    first = verifier.fused
    query = first_attention(base).q_proj
    query.weight = nn.Parameter(query.weight.detach() + 0.1, requires_grad=False)
    up_to_date(verifier)
    assert verifier.fused is not None
    assert verifier.fused is not first
    torch.testing.assert_close(logits_of(verifier), plain_of(base.model), atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_is_run_by_torch_until_it_is_merged() -> None:
    peft = pytest.importorskip("peft")
    base = fused_base("llama")
    verifier = CapturedVerifier(base, AttentionChoice(fixed_shapes=True))
    verifier.fuse(FAST)
    model = peft.get_peft_model(base.model, peft.LoraConfig(target_modules=["q_proj", "up_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.3)
    up_to_date(verifier)
    assert verifier.fused is None
    expected = plain_of(base.model)
    torch.testing.assert_close(logits_of(verifier), expected, atol=2e-5, rtol=1e-4)
    model.merge_and_unload()
    up_to_date(verifier)
    assert verifier.fused is not None
    torch.testing.assert_close(logits_of(verifier), expected, atol=5e-5, rtol=1e-3)


def shared(model: Any) -> None:
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight


def half_biased(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.bias = None


REFUSED = {
    "layers share weights": ("llama", shared),
    "some of the layers that are joined have biases": ("qwen2", half_biased),
    "carries a hook": ("llama", lambda model: model.register_forward_hook(lambda *_: None)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_joined_stays_as_it_is(reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, change = REFUSED[reason]
    base = fused_base(name)
    change(base.model)
    expected = plain_of(base.model)
    verifier = CapturedVerifier(base, AttentionChoice(fixed_shapes=True))
    verifier.fuse(EXACT)
    assert verifier.fused is None
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    torch.testing.assert_close(logits_of(verifier), expected, atol=2e-5, rtol=1e-4)
    query = first_attention(base).q_proj.weight
    assert query.untyped_storage().nbytes() == query.nbytes


def test_other_families_run_as_before_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    verifier = CapturedVerifier(tiny_base("olmo2"), AttentionChoice(fixed_shapes=True))
    verifier.fuse(EXACT)
    assert verifier.fused is None
    assert "no fused forward of 'olmo2'" in capsys.readouterr().err
    logits_of(verifier)
    assert verifier.steps_run_by.startswith("torch, fixed shapes")


@pytest.mark.parametrize("fault", ["wrong", "raises", "lacks"])
def test_kernels_that_fail_the_check_are_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attend = fused_forward.FusedForward._attend

    def faulty(self: Any, *arguments: Any) -> Tensor:
        if fault == "raises":
            raise RuntimeError("PassManager::run failed")
        if fault == "lacks":
            raise AttributeError("module 'triton.language' has no attribute 'dot'")
        return 1.1 * attend(self, *arguments)

    monkeypatch.setattr(fused_forward.FusedForward, "_attend", faulty)
    verifier = CapturedVerifier(fused_base("llama"), AttentionChoice(fixed_shapes=True))
    verifier.fuse(EXACT)
    assert verifier.fused is None
    (line,) = capsys.readouterr().err.splitlines()
    says = {"wrong": "is off by", "raises": "PassManager", "lacks": "no attribute 'dot'"}
    assert says[fault] in line


@pytest.mark.slow
def test_a_device_whose_sums_depend_on_company_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    product = fused_forward.FusedForward._product

    def rounded(self: Any, matrix: Any, inputs_TK: Tensor) -> Tensor:
        return product(self, matrix, inputs_TK) * (1 + 1e-7 * len(inputs_TK))

    monkeypatch.setattr(fused_forward.FusedForward, "_product", rounded)
    verifier = CapturedVerifier(fused_base("llama"), AttentionChoice(fixed_shapes=True))
    verifier.fuse(EXACT)
    assert verifier.fused is not None
    assert "differ by rounding" in capsys.readouterr().err


def test_heads_that_are_rotated_in_part_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    base = fused_base("llama")
    rotary = type(base.model.model.rotary_emb)
    whole = rotary.forward

    def half(self: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(part[..., ::2] for part in whole(self, *arguments))

    monkeypatch.setattr(rotary, "forward", half)
    monkeypatch.setattr(model_parts, "replaced_function", lambda config: None)
    with pytest.raises(Unsupported, match="rotates a part"):
        FusedModel.of(base)


def test_joined_layers_need_equal_ones() -> None:
    layers = [nn.Linear(4, 2, bias=False), nn.Linear(4, 3, bias=False)]
    whole = joined(layers)
    assert whole.weight_NK.shape == (5, 4)
    assert whole.bias_N is None
    torch.testing.assert_close(whole.weight_NK[2:], layers[1].weight)


def test_nothing_is_fused_unless_asked_for() -> None:
    assert fused.MODE is None
    base = tiny_base("llama")
    engine = build_engine(base, heads=random_heads(base), tree=BUSHY, fixed_shapes="always")
    assert isinstance(engine.verifier, CapturedVerifier)
    assert engine.verifier.fused is None
    assert engine.verifier.steps_run_by.startswith("torch, fixed shapes")


@pytest.mark.slow
def test_answers_are_those_of_plain_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MODE", FAST)
    base, plain = fused_base("qwen3"), fused_model("qwen3")
    tree = CandidateTree([(0,), (1,), (0, 0)])
    engine = build_engine(base, heads=random_heads(base), tree=tree, fixed_shapes="always")
    prompts = [random_prompt(length, length) for length in (2, 9)]
    results = engine.generate(prompts, max_new_tokens=4)
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt], device=base.device)
        text = plain.generate(ids, max_new_tokens=4, do_sample=False)[0, len(prompt) :]
        assert result.token_ids == text.tolist()
        assert result.stats.steps_run_by.startswith("fused kernels, fixed shapes")

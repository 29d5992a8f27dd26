"""custom_generate keeps an engine with a model, and the model may change between two calls, in ways
that leave no mark on its parameters. Answers are always those of plain generate.
"""

import copy
from typing import Any

import pytest
import torch
from support.small_engines import random_prompt
from support.tiny_models import tiny_model

import medusa_kit
from medusa_kit.engine import transformers_entry
from medusa_kit.infer.cpu.binding.kernels import load_library

recycling = medusa_kit.custom_generate_with(drafter="recycling", options={"num_nodes": 7})
needs_cpp = pytest.mark.skipif(
    load_library() is None, reason="the C++ kernels cannot be built on this machine"
)


@pytest.fixture
def known() -> Any:
    """A model whose steps C++ runs, where there is a compiler."""
    return tiny_model("llama-tied")


def arguments() -> dict[str, Any]:
    ids = torch.tensor([random_prompt(9, seed) for seed in range(3)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12}


def engine_of(model: Any) -> Any:
    return vars(model)[transformers_entry.ENGINES_ATTRIBUTE]._plain


def steps_run_by(model: Any, call: bool = False) -> str:
    if call:
        check_answers(model, None)
    return engine_of(model).verifier.steps_run_by


def check_answers(model: Any, before: torch.Tensor | None) -> torch.Tensor:
    """Those of plain generate, and other ones than `before`."""
    answer = model.generate(**arguments(), custom_generate=recycling)
    assert torch.equal(answer, model.generate(**arguments()))
    assert before is None or not torch.equal(answer, before)
    return answer


def test_writes_through_data_are_noticed(known: Any) -> None:
    before = check_answers(known, None)
    known.model.layers[0].mlp.up_proj.weight.data.neg_()
    before = check_answers(known, before)
    known.model.embed_tokens.weight.data[:, :4] *= 3  # the tied output embedding too
    before = check_answers(known, before)
    known.model.rotary_emb.inv_freq.mul_(3)
    check_answers(known, before)


@needs_cpp
def test_a_model_that_stays_keeps_its_engine(known: Any) -> None:
    check_answers(known, None)
    engine = engine_of(known)
    known.model.layers[0].mlp.up_proj.weight.data *= 1  # the same numbers
    check_answers(known, None)
    assert engine_of(known) is engine
    known(torch.tensor([[5, 6]]), output_hidden_states=True)  # leaves hooks of transformers' own
    check_answers(known, None)
    assert engine_of(known) is engine
    assert steps_run_by(copy.deepcopy(known), call=True).startswith("C++")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_a_merged_adapter_is_noticed(known: Any) -> None:
    peft = pytest.importorskip("peft")
    before = check_answers(known, None)
    config = peft.LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False)
    merged = peft.get_peft_model(known, config).merge_and_unload()
    assert merged is known
    check_answers(known, before)


def bent(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * -1.5


HOOKS = {
    "forward": lambda model: model.model.layers[1].mlp.register_forward_hook(bent),
    "pre": lambda model: model.model.layers[1].mlp.register_forward_pre_hook(
        lambda module, args: (args[0] * -1.5,)
    ),
    "norm": lambda model: model.model.norm.register_forward_hook(bent),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_run(known: Any, kind: str) -> None:
    before = check_answers(known, None)
    by = steps_run_by(known)
    hook = HOOKS[kind](known)
    during = check_answers(known, before)
    if by.startswith("C++"):
        assert steps_run_by(known).startswith("torch (model.")
        assert "carries a hook" in steps_run_by(known)
    hook.remove()
    assert torch.equal(check_answers(known, during), before)
    assert steps_run_by(known) == by


def test_hooks_on_every_module_run(known: Any) -> None:
    def double(module: Any, args: Any, output: Any) -> Any:
        return output * -1.5 if module is known.model.layers[1].mlp else output

    before = check_answers(known, None)
    hook = torch.nn.modules.module.register_module_forward_hook(double)
    try:
        check_answers(known, before)
        assert steps_run_by(known).startswith("torch (")
    finally:
        hook.remove()


def test_a_forward_of_the_instances_is_noticed(known: Any) -> None:
    before = check_answers(known, None)
    mlp = known.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) * -1.5
    check_answers(known, before)


def test_numbers_of_modules_are_noticed(known: Any) -> None:
    before = check_answers(known, None)
    known.model.layers[0].input_layernorm.variance_epsilon = 0.5
    before = check_answers(known, before)
    known.model.layers[1].self_attn.scaling *= 5
    check_answers(known, before)


def test_functions_of_classes_are_noticed(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = check_answers(known, None)
    kind = type(known.model.layers[0].mlp)
    monkeypatch.setattr(kind, "forward", lambda self, x: 0.1 * x)
    check_answers(known, before)
    monkeypatch.undo()
    assert torch.equal(check_answers(known, None), before)

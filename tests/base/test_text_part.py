"""The class for the text part of a multimodal checkpoint is a class like any other."""

from transformers import Qwen2VLConfig

from medusa_kit.base.text_part import causal_class, text_part_config

TINY = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
}  # fmt: skip


def test_it_can_be_subclassed() -> None:
    """Libraries that wrap models do so."""
    config = text_part_config(Qwen2VLConfig(text_config=TINY))
    made = causal_class(config)
    mine = type("Mine", (made,), {})
    model = mine._from_config(config)
    assert isinstance(model, made)
    assert type(model.model) is type(made._from_config(config).model)

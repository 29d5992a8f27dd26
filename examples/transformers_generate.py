"""Drafting within transformers' `generate`: `python examples/transformers_generate.py [MODEL]`."""

import sys

import medusa_kit

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
with medusa_kit.load(MODEL, heads=None) as engine:  # or any AutoModelForCausalLM of yours
    model, tokenizer = engine.base.model, engine.base.tokenizer

inputs = tokenizer("The capital of France is", return_tensors="pt")
plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
drafted = model.generate(
    **inputs, max_new_tokens=24, do_sample=False, custom_generate=medusa_kit.custom_generate
)
print(tokenizer.decode(drafted[0], skip_special_tokens=True))
print("the same tokens:", plain.tolist() == drafted.tolist())

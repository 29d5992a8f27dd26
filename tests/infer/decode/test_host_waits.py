"""What the loop of batch.py makes the host wait for on a device, where no forward is captured: a
read a step, whatever rows and layers.

Steps of captured forwards: tests/infer/device/test_on_the_device.py.
"""

import pytest
from support.cuda_stand_in import Device
from support.small_engines import BUSHY, build_engine, random_heads, random_prompt
from support.tiny_models import tiny_model

from medusa_kit.base.model import wrap_model


@pytest.mark.parametrize(
    ("kind", "num_rows", "num_layers", "family"),
    [
        ("plain", 3, 2, "llama"),
        ("medusa", 1, 4, "llama"),
        ("medusa", 3, 2, "mistral-sliding"),
        ("hydra", 3, 2, "llama"),
    ],
)
def test_a_step_waits_once_and_sends_little(
    cuda_stand_in: Device, kind: str, num_rows: int, num_layers: int, family: str
) -> None:
    """Sent: roots, lengths, where accepted nodes lie (once for their keys and values and once for
    hidden states). Requests that finish are told to the device once each."""
    model = tiny_model(family, num_hidden_layers=num_layers).to("cuda")
    model.generation_config.eos_token_id = None
    base = wrap_model(model)
    heads = None if kind == "plain" else random_heads(base, kind=kind)
    engine = build_engine(
        base, heads=heads, tree=BUSHY if heads else None, fixed_shapes="never", prefix_cache="off"
    )
    prompts = [random_prompt(5 + row, row) for row in range(num_rows)]
    found = []
    for tokens in (2, 25):
        with cuda_stand_in.counted() as counts:
            results = engine.generate(prompts, max_new_tokens=tokens, batch_size=num_rows)
        steps = max(result.stats.num_steps for result in results)
        found.append((steps, len(counts.waits), len(counts.sent)))
    (fewer, *short), (more, *long) = found
    assert more > fewer + 5
    waits, sent = ((b - a) / (more - fewer) for a, b in zip(short, long, strict=True))
    assert waits == pytest.approx(1, abs=0.2)
    assert sent <= (3.5 if kind == "plain" else 4.5)

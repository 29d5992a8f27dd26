"""Answers that follow a grammar, and are drafted for all the same:
`python examples/structured_output.py [MODEL]`."""

import json
import sys

import medusa_kit

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "degrees": {"type": "integer", "minimum": -50, "maximum": 60},
    },
    "required": ["city", "degrees"],
    "additionalProperties": False,
}

with medusa_kit.load(MODEL) as engine:
    ask = [{"role": "user", "content": "Invent a weather report for a city, as JSON."}]
    fits = medusa_kit.Grammar.json_schema(SCHEMA)
    print(json.loads(engine.generate(ask, max_new_tokens=64, grammar=fits).text))

    ask = [{"role": "user", "content": "Is a tomato a fruit?"}]
    yes_or_no = medusa_kit.Grammar.regex("(yes|no), because [a-z ]{10,60}\\.")
    print(engine.generate(ask, max_new_tokens=48, grammar=yes_or_no).text)

"""OpenAI's client with streaming and tools: start `medusa-kit serve`, then

python examples/openai_client.py [http://127.0.0.1:8000/v1]
"""

import json
import sys

from openai import OpenAI

client = OpenAI(
    base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none"
)
MODEL = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "Name three rivers."}],
    max_tokens=48,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
messages = [{"role": "user", "content": "How is the weather in Paris?"}]
answer = client.chat.completions.create(
    model=MODEL, messages=messages, tools=[WEATHER], tool_choice="required"
)
message = answer.choices[0].message
call = message.tool_calls[0]
print("it calls", call.function.name, json.loads(call.function.arguments))

messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}]
last = client.chat.completions.create(
    model=MODEL, messages=messages, tools=[WEATHER], max_tokens=48
)
print(last.choices[0].message.content)

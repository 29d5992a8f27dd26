"""What clients are asked to have filled in: few tokens, whatever the model."""

from typing import Literal

from pydantic import BaseModel

Place = Literal["Oslo", "Rome"]


class Trip(BaseModel):
    place: Place
    days: Literal[1, 2, 3]


def get_weather(place: Place) -> str:
    """The weather of a place."""
    return f"It rains in {place}."


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": get_weather.__doc__,
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}

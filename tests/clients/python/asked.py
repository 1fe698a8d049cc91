"""The server, the questions and the result type of the clients in Python."""

import os

from pydantic import BaseModel

URL = os.environ["BASE_URL"]
LONG = "Count these." + " word" * 15000
"""A prompt of 30,010 tokens."""


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"18 degrees in {city}"

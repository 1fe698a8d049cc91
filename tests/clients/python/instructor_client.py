"""instructor: one model of the answer in five modes."""

import json
import os

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


client = OpenAI(base_url=f"{os.environ['BASE_URL']}/v1", api_key="none", max_retries=0)
found = {}
for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"):
    patched = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    reply = patched.chat.completions.create(
        model="tiny",
        response_model=Weather,
        max_retries=0,
        messages=[{"role": "user", "content": "How is Rome?"}],
    )
    found[mode] = reply.model_dump()
print(json.dumps(found))

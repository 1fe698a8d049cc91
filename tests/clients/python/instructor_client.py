"""instructor: one model of the answer in five modes, of which those of tools force a call."""

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
found = {"chat": {}, "responses": {}}
for dialect, mode, question in (
    ("chat", "TOOLS", "Say hello."),
    ("chat", "TOOLS_STRICT", "Say hello."),
    ("chat", "JSON", "How is Rome?"),
    ("chat", "JSON_SCHEMA", "How is Rome?"),
    ("responses", "RESPONSES_TOOLS", "Say hello."),
):
    patched = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    reply = patched.chat.completions.create(
        model="tiny",
        response_model=Weather,
        max_retries=0,
        messages=[{"role": "user", "content": question}],
    )
    found[dialect][mode] = reply.model_dump()
print(json.dumps(found))

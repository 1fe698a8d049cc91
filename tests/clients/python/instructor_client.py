"""instructor: one model of the answer in five modes, of which those of tools force a call."""

import json

import instructor
from asked import URL, Weather
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
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

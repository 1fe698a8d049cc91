"""The `llm` command's library: a text, a stream, a schema and a tool."""

import json
import os
from pathlib import Path

from asked import LONG, URL, weather

FOLDER = Path(os.environ["LLM_USER_PATH"])
FOLDER.mkdir(parents=True, exist_ok=True)
(FOLDER / "extra-openai-models.yaml").write_text(
    f"""\
- model_id: tiny-cluster
  model_name: tiny
  api_base: "{URL}/v1"
  supports_schema: true
  supports_tools: true
"""
)

import llm  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
}

model = llm.get_model("tiny-cluster")
model.key = "none"
found = {
    "text": model.prompt("Hi", stream=False).text(),
    "pieces": "".join(model.prompt("Hi", stream=True)),
    "object": json.loads(model.prompt("How is Rome?", schema=SCHEMA, stream=False).text()),
    "long": model.prompt(LONG, stream=False).text(),
    "report": model.chain("How is Rome?", tools=[weather]).text(),
}
print(json.dumps({"chat": found}))

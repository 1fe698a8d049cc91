"""LiteLLM: texts, streams, tool calls and formats over three dialects."""

import json

import litellm
from asked import LONG, URL

MESSAGES = [{"role": "user", "content": "How is Rome?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CHOICE = {"type": "function", "function": {"name": "weather"}}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
}
dialects = {
    "chat": {"model": "openai/tiny", "api_base": f"{URL}/v1", "api_key": "none"},
    "anthropic": {"model": "anthropic/tiny", "api_base": URL, "api_key": "none"},
    "ollama": {"model": "ollama_chat/tiny", "api_base": URL},
}


def ask(dialect, question, **options):
    """Return the message that answers a question."""
    messages = [{"role": "user", "content": question}]
    return litellm.completion(**dialect, messages=messages, **options).choices[0].message


found = {}
for name, dialect in dialects.items():
    reply = litellm.completion(**dialect, messages=MESSAGES, tools=[TOOL]).choices[0].message
    (call,) = reply.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "18 degrees"}
    history = [*MESSAGES, reply.model_dump(exclude_none=True), result]
    pieces = litellm.completion(**dialect, messages=MESSAGES, stream=True)
    found[name] = {
        "text": litellm.completion(**dialect, messages=MESSAGES).choices[0].message.content,
        "pieces": "".join(piece.choices[0].delta.content or "" for piece in pieces),
        "call": json.loads(call.function.arguments),
        "report": litellm.completion(**dialect, messages=history, tools=[TOOL]).choices[0].message.content,
        "long": ask(dialect, LONG).content,
        "format": json.loads(ask(dialect, "How is Rome?", response_format=FORMAT).content),
    }
    if name != "ollama":  # its API has no choice of tools
        (call,) = ask(dialect, "Say hello.", tools=[TOOL], tool_choice=CHOICE).tool_calls
        found[name]["forced"] = json.loads(call.function.arguments)
print(json.dumps(found))

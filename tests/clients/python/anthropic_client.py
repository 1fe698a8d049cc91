"""Anthropic's client: a text, a stream, calls, a call's result and a long prompt."""

import json

from anthropic import Anthropic
from asked import LONG, URL

TOOL = {
    "name": "weather",
    "description": "Return the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}

client = Anthropic(base_url=URL, api_key="none", max_retries=0)


def ask(question, *more, **options):
    """Return the answer to a question, which may have further messages."""
    messages = [{"role": "user", "content": question}, *more]
    return client.messages.create(model="tiny", max_tokens=200, messages=messages, **options)


def call_of(message):
    """Return the call of a message."""
    (call,) = (block for block in message.content if block.type == "tool_use")
    return call


called = ask("How is Rome?", tools=[TOOL])
result = {"type": "tool_result", "tool_use_id": call_of(called).id, "content": "18 degrees"}
turns = [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
hi = [{"role": "user", "content": "Hi"}]
with client.messages.stream(model="tiny", max_tokens=200, messages=hi) as stream:
    pieces = "".join(stream.text_stream)
choice = {"type": "tool", "name": "weather"}
found = {
    "text": ask("Hi").content[0].text,
    "pieces": pieces,
    "call": call_of(called).input,
    "report": ask("How is Rome?", *turns, tools=[TOOL]).content[0].text,
    "forced": call_of(ask("Say hello.", tools=[TOOL], tool_choice=choice)).input,
    "long": ask(LONG).content[0].text,
}
print(json.dumps({"anthropic": found}))

"""Ollama's client: a text, a stream, a call and its result, a format and a long prompt."""

import json

import ollama
from asked import LONG, URL, Weather, weather

client = ollama.Client(host=URL)


def ask(question, *more, **options):
    """Return the message that answers a question, which may have further messages."""
    messages = [{"role": "user", "content": question}, *more]
    return client.chat("tiny", messages=messages, think=False, **options).message


called = ask("How is Rome?", tools=[weather])
(call,) = called.tool_calls
result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
hi = [{"role": "user", "content": "Hi"}]
parts = client.chat("tiny", messages=hi, think=False, stream=True)
typed = ask("How is Rome?", format=Weather.model_json_schema())
found = {
    "text": ask("Hi").content,
    "pieces": "".join(part.message.content for part in parts),
    "call": call.function.arguments,
    "report": ask("How is Rome?", called, result, tools=[weather]).content,
    "object": json.loads(typed.content),
    "long": ask(LONG).content,
}
print(json.dumps({"ollama": found}))

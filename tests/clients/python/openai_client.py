"""OpenAI's client: texts, streams, calls and parsed formats over chat completions and responses."""

import json

from asked import LONG, URL, Weather
from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": SCHEMA, "strict": True}

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def chat(question, **options):
    """Return the message that answers a question over chat completions."""
    messages = [{"role": "user", "content": question}]
    return (
        client.chat.completions.parse(model="tiny", messages=messages, **options).choices[0].message
    )


def respond(question, **options):
    """Return the response to a question."""
    return client.responses.parse(model="tiny", input=question, **options)


def arguments(response):
    """Return the arguments of the call of a response."""
    (call,) = (item for item in response.output if item.type == "function_call")
    return json.loads(call.arguments)


tools = {"tools": [{"type": "function", "function": FUNCTION}]}
choice = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
asked = {"role": "user", "content": "How is Rome?"}
called = client.chat.completions.create(model="tiny", messages=[asked], **tools).choices[0].message
(call,) = called.tool_calls
result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
history = [asked, called, result]
stream = client.chat.completions.create(
    model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True
)
found = {
    "chat": {
        "text": chat("Hi").content,
        "pieces": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
        "call": json.loads(call.function.arguments),
        "report": client.chat.completions.create(model="tiny", messages=history, **tools)
        .choices[0]
        .message.content,
        "forced": json.loads(
            chat("Say hello.", **tools, **choice).tool_calls[0].function.arguments
        ),
        "object": chat("How is Rome?", response_format=Weather).parsed.model_dump(),
        "long": chat(LONG).content,
    }
}
tools = {"tools": [{"type": "function", **FUNCTION}]}
choice = {"tool_choice": {"type": "function", "name": "weather"}}
called = respond("How is Rome?", **tools)
(call,) = (item for item in called.output if item.type == "function_call")
result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
with client.responses.stream(model="tiny", input="Hi") as events:
    pieces = [each.delta for each in events if each.type == "response.output_text.delta"]
found["responses"] = {
    "text": respond("Hi").output_text,
    "pieces": "".join(pieces),
    "call": arguments(called),
    "report": respond([result], previous_response_id=called.id, **tools).output_text,
    "forced": arguments(respond("Say hello.", **tools, **choice)),
    "object": respond("How is Rome?", text_format=Weather).output_parsed.model_dump(),
    "long": respond(LONG).output_text,
}
print(json.dumps(found))

"""LangChain: texts, streams, tool calls and structured output over three dialects."""

import json

from asked import LONG, URL, Weather, weather
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

weather = tool(weather)
openai = ChatOpenAI(model="tiny", base_url=f"{URL}/v1", api_key="none", max_retries=0)
models = {
    "chat": openai,
    "responses": ChatOpenAI(model="tiny", base_url=f"{URL}/v1", api_key="none", max_retries=0, use_responses_api=True),
    "anthropic": ChatAnthropic(model="tiny", base_url=URL, api_key="none", max_retries=0),
    "ollama": ChatOllama(model="tiny", base_url=URL),
}
found = {}
for name, model in models.items():
    bound = model.bind_tools([weather])
    question = HumanMessage("How is Rome?")
    asked = bound.invoke([question])
    (call,) = asked.tool_calls
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    streamed = None
    for chunk in bound.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    found[name] = {
        "text": model.invoke("Hi").text,
        "pieces": "".join(chunk.text for chunk in model.stream("Hi")),
        "call": call["args"],
        "streamed": [each["args"] for each in streamed.tool_calls],
        "report": bound.invoke([question, asked, result]).text,
        "object": model.with_structured_output(Weather).invoke("How is Rome?").model_dump(),
        "long": model.invoke(LONG).text,
    }
    if name != "ollama":  # its API has no choice of tools
        (call,) = model.bind_tools([weather], tool_choice="weather").invoke("Say hello.").tool_calls
        found[name]["forced"] = call["args"]
for method in ("function_calling", "json_mode", "json_schema"):
    typed = openai.with_structured_output(Weather, method=method)
    found["chat"][method] = typed.invoke("How is Rome? Answer in JSON.").model_dump()
print(json.dumps(found))

"""Pydantic AI: a text, a stream, and an agent with a tool and a typed result, over chat completions and messages."""

import asyncio
import json

from anthropic import AsyncAnthropic
from asked import LONG, URL, Weather, weather
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


async def streamed(agent: Agent) -> str:
    """Return the text of a stream."""
    async with agent.run_stream("Hi") as result:
        return "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)])


openai_provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
anthropic_provider = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key="none"))
models = {
    "chat": OpenAIChatModel("tiny", provider=openai_provider),
    "responses": OpenAIResponsesModel("tiny", provider=openai_provider),
    "anthropic": AnthropicModel("tiny", provider=anthropic_provider),
}
found = {}
for name, model in models.items():
    typed = Agent(model, output_type=Weather, tools=[weather])
    native = Agent(model, output_type=NativeOutput(Weather))
    found[name] = {
        "text": Agent(model).run_sync("Hi").output,
        "pieces": asyncio.run(streamed(Agent(model))),
        "report": Agent(model, tools=[weather]).run_sync("How is Rome?").output,
        "forced": Agent(model, output_type=Weather).run_sync("Say hello.").output.model_dump(),
        "long": Agent(model).run_sync(LONG).output,
        "object": typed.run_sync("How is Rome?").output.model_dump(),
    }
    if name != "anthropic":  # its profile knows only Anthropic's own models for this
        found[name]["format"] = native.run_sync("How is Rome?").output.model_dump()
print(json.dumps(found))

"""OpenAI's Agents SDK: a tool loop and a typed result, over chat completions and responses, and a stream."""

import asyncio
import json

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import LONG, URL, Weather, weather
from openai import AsyncOpenAI

set_tracing_disabled(True)
weather = function_tool(weather)


async def main() -> None:
    """Run the agents and print their results."""
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    found = {}
    for name, kind in (("chat", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel)):
        model = kind(model="tiny", openai_client=client)
        agent = Agent(name="a", instructions="Be kind.", model=model, tools=[weather])
        typed = Agent(name="b", model=model, output_type=Weather)
        plain = Agent(name="c", model=model)
        forced = Agent(
            name="d",
            model=model,
            tools=[weather],
            model_settings=ModelSettings(tool_choice="weather"),
            tool_use_behavior="stop_on_first_tool",
        )
        streamed = Runner.run_streamed(agent, "How is Rome?")
        async for _ in streamed.stream_events():
            pass
        found[name] = {
            "text": (await Runner.run(plain, "Hi")).final_output,
            "forced": (await Runner.run(forced, "Say hello.")).final_output,
            "long": (await Runner.run(plain, LONG)).final_output,
            "report": (await Runner.run(agent, "How is Rome?")).final_output,
            "streamed": streamed.final_output,
            "object": (await Runner.run(typed, "How is Rome?")).final_output.model_dump(),
        }
    print(json.dumps(found))


asyncio.run(main())

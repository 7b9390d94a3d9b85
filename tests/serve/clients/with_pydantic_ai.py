# SPDX-License-Identifier: Apache-2.0
"""pydantic-ai: classes as the output of tools and as JSON, functions that are called, and streams."""

import asyncio
from typing import Any

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.serve.clients.scenario import ADDRESS, LEFT_AFTER, LONG, MODEL, PROMPT, SHORT, Echo, Order, order, run


def agent(tokens: int = LONG, **fields: Any) -> Agent[None, Any]:
    """An agent with a separate client, because a client belongs to one event loop."""
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{ADDRESS}/v1", api_key="none"))
    return Agent(model, model_settings={"temperature": 0, "max_tokens": tokens}, **fields)


def tool() -> Any:
    made = agent(output_type=ToolOutput(Order, name="order"))
    return {"arguments": made.run_sync(PROMPT).output.model_dump(mode="json")}


def tool_in_a_stream() -> Any:
    async def ask() -> Any:
        async with agent(output_type=ToolOutput(Order, name="order")).run_stream(PROMPT) as result:
            return (await result.get_output()).model_dump(mode="json")

    return {"arguments": asyncio.run(ask())}


def offered() -> Any:
    return agent(SHORT, tools=[order]).run_sync(PROMPT).output


def structured() -> Any:
    return agent(output_type=NativeOutput(Order)).run_sync(PROMPT).output.model_dump(mode="json")


def stream() -> Any:
    async def ask() -> Any:
        async with agent(SHORT).run_stream(PROMPT) as result:
            return await result.get_output()

    return asyncio.run(ask())


def leave() -> Any:
    async def ask() -> Any:
        read = 0
        async with agent(output_type=NativeOutput(Echo)).run_stream(PROMPT) as result:
            async for _ in result.stream_response(debounce_by=None):
                read += 1
                if read == LEFT_AFTER:
                    await result.cancel()
                    break
        return read

    return asyncio.run(ask())


run(tool=tool, tool_in_a_stream=tool_in_a_stream, offered=offered, structured=structured, stream=stream, leave=leave)

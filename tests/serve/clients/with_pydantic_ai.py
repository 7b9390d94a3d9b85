# SPDX-License-Identifier: Apache-2.0
"""pydantic-ai: classes as the output of tools and as JSON, functions that are called, and streams."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.serve.clients.scenario import ADDRESS, LEFT_AFTER, LONG, MODEL, PROMPT, SHORT, Order, order, run

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{ADDRESS}/v1", api_key="none"))


def settings(tokens: int = LONG) -> Any:
    return {"temperature": 0, "max_tokens": tokens}


def tool() -> Any:
    agent = Agent(model, output_type=ToolOutput(Order, name="order"), model_settings=settings())
    return {"arguments": agent.run_sync(PROMPT).output.model_dump(mode="json")}


def tool_in_a_stream() -> Any:
    async def ask() -> Any:
        agent = Agent(model, output_type=ToolOutput(Order, name="order"), model_settings=settings())
        async with agent.run_stream(PROMPT) as result:
            return (await result.get_output()).model_dump(mode="json")

    return {"arguments": asyncio.run(ask())}


def offered() -> Any:
    agent = Agent(model, tools=[order], model_settings=settings(SHORT))
    return agent.run_sync(PROMPT).output


def structured() -> Any:
    agent = Agent(model, output_type=NativeOutput(Order), model_settings=settings())
    return agent.run_sync(PROMPT).output.model_dump(mode="json")


def stream() -> Any:
    async def ask() -> Any:
        async with Agent(model, model_settings=settings(SHORT)).run_stream(PROMPT) as result:
            return await result.get_output()

    return asyncio.run(ask())


def leave() -> Any:
    async def ask() -> Any:
        read = 0
        async with Agent(model, model_settings=settings()).run_stream(PROMPT) as result:
            async for _ in result.stream_text(delta=True, debounce_by=None):
                read += 1
                if read == LEFT_AFTER:
                    await result.cancel()
                    break
        return read

    return asyncio.run(ask())


run(
    tool=tool,
    tool_in_a_stream=tool_in_a_stream,
    offered=offered,
    structured=structured,
    stream=stream,
    leave=leave,
)

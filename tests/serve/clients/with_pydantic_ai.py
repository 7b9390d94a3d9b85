# SPDX-License-Identifier: Apache-2.0
"""pydantic-ai: classes as the output of tools and as JSON, functions that are called, and streams."""

import asyncio
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_ai import Agent, NativeOutput, RunContext, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.serve.clients.scenario import ADDRESS, LEFT_AFTER, LONG, MODEL, PROMPT, SHORT, Echo, Order, order, run

Digit = Annotated[int, Field(ge=0, le=9)]


def agent(tokens: int = LONG, **fields: Any) -> Agent[None, Any]:
    """An agent with a separate client, because a client belongs to one event loop."""
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{ADDRESS}/v1", api_key="none"))
    return Agent(model, **{"model_settings": {"temperature": 0, "max_tokens": tokens}, **fields})


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


def agent_of_ten_turns() -> Any:
    """Ten turns with three tools: each turn calls one, whose result goes back, and ends in words."""
    called = []

    def settings(context: RunContext) -> Any:
        turn = len(called) if context.run_step == 1 else None
        named = None if turn is None else {"type": "function", "function": {"name": names[turn % len(names)]}}
        choice = {"tool_choice": named or "none", "parallel_tool_calls": False}
        return {"temperature": 0, "max_tokens": SHORT, "extra_body": choice}

    def add(digit: Digit) -> str:
        """Adds a digit."""
        called.append(("add", digit))
        return "added"

    def look(kind: Literal["for", "while"]) -> str:
        """Looks something up."""
        called.append(("look", kind))
        return "found"

    def stop() -> str:
        """Stops."""
        called.append(("stop", None))
        return "stopped"

    names = ["add", "look", "stop"]
    made = agent(tools=[add, look, stop], model_settings=settings)
    history: Any = None
    for _ in range(10):
        history = made.run_sync("Go on.", message_history=history).all_messages()
    return {"called": called, "messages": len(history)}


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


run(
    tool=tool,
    tool_in_a_stream=tool_in_a_stream,
    offered=offered,
    agent_of_ten_turns=agent_of_ten_turns,
    structured=structured,
    stream=stream,
    leave=leave,
)

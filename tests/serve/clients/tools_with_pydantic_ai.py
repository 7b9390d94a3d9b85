# SPDX-License-Identifier: Apache-2.0
"""An agent of pydantic-ai with two functions, asked twice, whole and streamed: what it said and called."""

import asyncio
import json
import sys
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

ADDRESS, TASK = sys.argv[1], json.loads(sys.argv[2])
CALLED: list[list[str]] = []


def weather(place: str) -> str:
    """The weather of a place."""
    CALLED.append(["weather", place])
    return str(TASK["results"]["weather"])


def time(place: str) -> str:
    """The time of a place."""
    CALLED.append(["time", place])
    return str(TASK["results"]["time"])


def agent() -> Agent[None, str]:
    model = OpenAIChatModel(TASK["model"], provider=OpenAIProvider(base_url=f"{ADDRESS}/v1", api_key="none"))
    return Agent(model, model_settings={"temperature": 0}, tools=[weather, time])


def whole() -> list[str]:
    said, history = [], None
    for question in TASK["questions"]:
        result = agent().run_sync(question, message_history=history)
        said.append(result.output)
        history = result.all_messages()
    return said


async def streamed() -> list[str]:
    said: list[str] = []
    history: Any = None
    for question in TASK["questions"]:
        async with agent().run_stream(question, message_history=history) as result:
            said.append(await result.get_output())
        history = result.all_messages()
    return said


answers = {"whole": whole(), "streamed": asyncio.run(streamed())}
print(json.dumps(answers | {"called": CALLED}))

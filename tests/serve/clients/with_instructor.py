# SPDX-License-Identifier: Apache-2.0
"""instructor: pydantic's classes through tools and through schemas, whole and in pieces."""

from typing import Any

import instructor
import openai

from tests.serve.clients.scenario import ADDRESS, LONG, MODEL, PROMPT, Order, run

ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": PROMPT}],
    "temperature": 0,
    "max_tokens": LONG,
    "max_retries": 0,
}


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0), mode=mode)


def tool() -> Any:
    answer = client(instructor.Mode.TOOLS).chat.completions.create(**ASKED, response_model=Order)
    return {"arguments": answer.model_dump(mode="json")}


def tool_in_a_stream() -> Any:
    parts = client(instructor.Mode.TOOLS).chat.completions.create_partial(**ASKED, response_model=Order)
    return {"arguments": list(parts)[-1].model_dump(mode="json")}


def structured() -> Any:
    answer = client(instructor.Mode.JSON_SCHEMA).chat.completions.create(**ASKED, response_model=Order)
    return answer.model_dump(mode="json")


# The client reads a stream to its end before it passes on the parts, so nobody can leave one.
run(tool=tool, tool_in_a_stream=tool_in_a_stream, structured=structured)

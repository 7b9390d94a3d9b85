# SPDX-License-Identifier: Apache-2.0
"""The client of OpenAI: its helpers for pydantic's classes, and streams."""

import json
from typing import Any

import openai

from tests.serve.clients.scenario import ADDRESS, ECHO, LONG, MODEL, PROMPT, SHORT, TOOL, Order, first, order, run

client = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0)
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0}


def tool() -> Any:
    choice = {"type": "function", "function": {"name": "order"}}
    tools = [
        openai.pydantic_function_tool(Order, name="order"),
        {"type": "function", "function": {"name": "stop", "strict": True}},
    ]
    message = client.chat.completions.parse(**ASKED, tools=tools, tool_choice=choice).choices[0].message
    (call,) = message.tool_calls
    arguments = call.function.parsed_arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": order(arguments.customer, arguments.items)}
    messages = [*ASKED["messages"], message, result]
    after = client.chat.completions.create(**ASKED | {"messages": messages}, tools=tools, max_tokens=8)
    return {"arguments": json.loads(call.function.arguments), "after": after.choices[0].message.content}


def tool_in_a_stream() -> Any:
    with client.chat.completions.stream(**ASKED, tools=[TOOL], tool_choice="required") as stream:
        message = stream.get_final_completion().choices[0].message
    return {"arguments": json.loads(message.tool_calls[0].function.arguments)}


def structured() -> Any:
    answer = client.chat.completions.parse(**ASKED, response_format=Order)
    return answer.choices[0].message.parsed.model_dump(mode="json")


def structured_response() -> Any:
    answer = client.responses.parse(model=MODEL, input=PROMPT, temperature=0, text_format=Order)
    return answer.output_parsed.model_dump(mode="json")


def stream() -> Any:
    chunks = client.chat.completions.create(**ASKED, max_tokens=SHORT, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def leave() -> Any:
    with client.chat.completions.create(**ASKED, max_tokens=LONG, response_format=ECHO, stream=True) as chunks:
        return len(first(chunks))


run(
    tool=tool,
    tool_in_a_stream=tool_in_a_stream,
    structured=structured,
    structured_response=structured_response,
    stream=stream,
    leave=leave,
)

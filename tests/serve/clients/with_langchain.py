# SPDX-License-Identifier: Apache-2.0
"""LangChain's models of OpenAI's API: bound tools, both ways to structured output, and streams."""

from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as as_tool
from langchain_openai import ChatOpenAI

from tests.serve.clients.scenario import ADDRESS, ECHO, LONG, MODEL, PROMPT, SHORT, Order, first, order, run

TOOLS = [as_tool(order)]


def model(tokens: int = LONG, **fields: Any) -> Any:
    options = {"base_url": f"{ADDRESS}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}
    return ChatOpenAI(model=MODEL, max_tokens=tokens, **options, **fields)


def tool() -> Any:
    messages: list[Any] = [HumanMessage(PROMPT)]
    messages.append(model().bind_tools(TOOLS, tool_choice="order").invoke(messages))
    (call,) = messages[-1].tool_calls
    messages.append(ToolMessage(TOOLS[0].invoke(call["args"]), tool_call_id=call["id"]))
    return {"arguments": call["args"], "after": model(8).bind_tools(TOOLS).invoke(messages).content}


def tool_in_a_stream() -> Any:
    whole = None
    for chunk in model().bind_tools(TOOLS, tool_choice="required").stream(PROMPT):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return {"arguments": whole.tool_calls[0]["args"]}


def structured() -> Any:
    answers = [
        model().with_structured_output(Order, method=method).invoke(PROMPT)
        for method in ("json_schema", "function_calling")
    ]
    assert all(isinstance(answer, Order) for answer in answers)
    return answers[0].model_dump(mode="json")


def structured_response() -> Any:
    answer = model(use_responses_api=True).with_structured_output(Order, method="json_schema").invoke(PROMPT)
    return answer.model_dump(mode="json")


def stream() -> Any:
    return "".join(chunk.content for chunk in model(SHORT).stream(PROMPT))


def leave() -> Any:
    chunks = model().bind(response_format=ECHO).stream(PROMPT)
    read = first(chunks)
    chunks.close()
    return len(read)


run(
    tool=tool,
    tool_in_a_stream=tool_in_a_stream,
    structured=structured,
    structured_response=structured_response,
    stream=stream,
    leave=leave,
)

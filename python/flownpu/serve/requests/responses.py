# SPDX-License-Identifier: Apache-2.0
"""Requests of OpenAI's /v1/responses, and how they become chat requests.

The server keeps no conversations: each request must hold all turns of its conversation.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag

from flownpu.serve.requests.openai import (
    ChatRequest,
    Function,
    FunctionName,
    JsonObjectFormat,
    JsonSchema,
    Most,
    Number,
    Portion,
    Strict,
    TextFormat,
)
from flownpu.serve.requests.validation import validated


class InputText(Strict):
    """A part of a turn that is text."""

    type: Literal["input_text", "output_text"]
    text: str
    logprobs: list[Any] | None = None


class InputImage(Strict):
    """An image in a turn."""

    type: Literal["input_image"]
    image_url: str


class Item(Strict):
    """A part of the conversation; clients may send back an answer's items with fields that are ignored here."""

    model_config = ConfigDict(extra="ignore", strict=True)


class InputMessage(Item):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[InputText | InputImage, Field(discriminator="type")]]

    def document(self) -> dict[str, Any]:
        """The turn of a chat."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        parts: list[dict[str, Any]] = [
            {"type": "text", "text": part.text}
            if isinstance(part, InputText)
            else {"type": "image_url", "image_url": {"url": part.image_url}}
            for part in self.content
        ]
        return {"role": self.role, "content": parts}


class FunctionCall(Item):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def document(self) -> dict[str, Any]:
        """The turn of a chat."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": self.call_id, "function": function}]}


class FunctionCallOutput(Item):
    """The result of a called function."""

    type: Literal["function_call_output"]
    call_id: str
    output: str

    def document(self) -> dict[str, Any]:
        """The turn of a chat."""
        return {"role": "tool", "content": self.output, "tool_call_id": self.call_id}


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return str(kind)


AnyItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


class ResponsesFunction(Function):
    """A function that the model may call."""

    type: Literal["function"]


class ResponsesNamedTool(FunctionName):
    """The one function that the model must call."""

    type: Literal["function"]


class ResponsesJsonSchema(JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


class TextOptions(Strict):
    """The form of the answer's text."""

    format: Annotated[TextFormat | JsonObjectFormat | ResponsesJsonSchema, Field(discriminator="type")] | None = None


class Reasoning(Strict):
    """How long the model thinks. Its summary is never written."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


def _without_logprobs(names: list[str]) -> list[str]:
    """Refuses logprobs. All other names ask for features that this server lacks, and change no answer."""
    if "message.output_text.logprobs" in names:
        raise ValueError("log-probabilities are in /v1/chat/completions and /v1/completions only")
    return names


class ResponsesRequest(Strict):
    """The fields of /v1/responses."""

    model: str
    input: str | Annotated[list[AnyItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Most = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Portion | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[ResponsesFunction] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[str], AfterValidator(_without_logprobs)] | None = None
    # Fields for features that the server lacks.
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    # The following fields change no answer of this server.
    metadata: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None

    def request(self) -> ChatRequest:
        """The request as one for a chat; consecutive calls become one turn."""
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in items:
            turn: dict[str, Any] = item.document()
            last: dict[str, Any] = messages[-1] if messages else {}
            if turn.get("tool_calls") and last.get("role") == "assistant":
                last["tool_calls"] = [*last.get("tool_calls", []), *turn["tool_calls"]]
            else:
                messages.append(turn)
        form = None
        if self.text is not None and self.text.format is not None:
            form = self.text.format.model_dump(by_alias=True, exclude_none=True)
            if form["type"] == "json_schema":
                kind = form.pop("type")
                form = {"type": kind, "json_schema": form}
        choice: Any = self.tool_choice
        if isinstance(choice, ResponsesNamedTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools or []
        ]
        return validated(
            ChatRequest,
            {
                "model": self.model,
                "messages": messages,
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "response_format": form,
                "tools": tools or None,
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            },
        )

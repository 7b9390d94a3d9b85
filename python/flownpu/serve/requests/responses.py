# SPDX-License-Identifier: Apache-2.0
"""Requests of OpenAI's /v1/responses, and how they become chat requests.

The server keeps no conversations: each request must hold all turns of its conversation.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from flownpu.serve.requests.openai import (
    ChatRequest,
    Function,
    FunctionName,
    Items,
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


Content = str | Items[Annotated[InputText | InputImage, Field(discriminator="type")]]


def _content(content: Content) -> Any:
    """A turn's text or parts, as a chat has them."""
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, InputText)
        else {"type": "image_url", "image_url": {"url": part.image_url}}
        for part in content
    ]


class Item(Strict):
    """A part of the conversation; clients may send back an answer's items with fields that are ignored here."""

    model_config = ConfigDict(extra="ignore", strict=True)


class InputMessage(Item):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def document(self) -> dict[str, Any]:
        """The turn of a chat."""
        return {"role": self.role, "content": _content(self.content)}


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
    output: Content

    def document(self) -> dict[str, Any]:
        """The turn of a chat."""
        return {"role": "tool", "content": _content(self.output), "tool_call_id": self.call_id}


class ReasoningText(Item):
    """A part of thoughts."""

    text: str


class ReasoningItem(Item):
    """The thoughts of an earlier answer. A summary or encrypted content of another server is no text of the model's."""

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None

    def document(self) -> dict[str, Any]:
        """The beginning of a turn of a chat."""
        thoughts = "\n".join(part.text for part in self.content or [])
        return {"role": "assistant", "content": None, "reasoning_content": thoughts or None}


def _of_a_tool(kind: str) -> str:
    if not re.fullmatch(r"item_reference|\w+_call|\w+_call_output|mcp_\w+", kind):
        raise ValueError(
            f"Input should be one of {', '.join(map(repr, _KNOWN_ITEMS))}, 'item_reference', or a step of a built-in "
            "tool, such as 'web_search_call'"
        )
    return kind


class OtherItem(Item):
    """A step of a tool that another server ran, or a reference to thoughts that it keeps; it is left out."""

    type: Annotated[str, AfterValidator(_of_a_tool)]
    id: str | None = None

    @model_validator(mode="after")
    def _is_not_needed(self) -> "OtherItem":
        if self.type == "item_reference" and not (self.id or "").startswith("rs_"):
            raise ValueError(
                "this server keeps no items, and only references to thoughts (rs_...) can be left out: send the item "
                "itself, as clients do with store: false"
            )
        return self


_KNOWN_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if kind in _KNOWN_ITEMS else "other"


AnyItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind),
]


class ResponsesFunction(Function):
    """A function that the model may call."""

    type: Literal["function"]


class BuiltInTool(Item):
    """A tool that OpenAI's server runs, or that its models were trained with; it is left out."""

    type: str


def _tool_kind(tool: Any) -> str:
    # In a tuple, since no set can be asked for a list, which a client may send.
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "function" if kind in ("function", None) else "built-in"


AnyTool = Annotated[
    Annotated[ResponsesFunction, Tag("function")] | Annotated[BuiltInTool, Tag("built-in")], Discriminator(_tool_kind)
]


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
    tools: Items[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: Annotated[Items[str], AfterValidator(_without_logprobs)] | None = None
    # Fields for features that the server lacks.
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    # The following fields change no answer of this server.
    metadata: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None

    @property
    def left_out(self) -> list[str]:
        """The types of tools and items that the model is not told of."""
        items = [] if isinstance(self.input, str) else self.input
        return [one.type for one in (*(self.tools or []), *items) if isinstance(one, BuiltInTool | OtherItem)]

    def _messages(self) -> list[dict[str, Any]]:
        """The turns of a chat: thoughts, words and calls that follow each other are one turn of the model's."""
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in items:
            if isinstance(item, OtherItem) or (isinstance(item, ReasoningItem) and not item.content):
                continue
            turn: dict[str, Any] = item.document()
            last: dict[str, Any] = messages[-1] if messages else {}
            if last.get("role") != "assistant" or turn["role"] != "assistant":
                messages.append(turn)
            elif turn.get("tool_calls"):
                last["tool_calls"] = [*last.get("tool_calls", []), *turn["tool_calls"]]
            elif last["content"] is None and "tool_calls" not in last:  # thoughts, which these words follow
                last["content"] = turn["content"]
            else:
                messages.append(turn)
        return messages

    def request(self) -> ChatRequest:
        """The request as one for a chat."""
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
            if isinstance(tool, ResponsesFunction)
        ]
        return validated(
            ChatRequest,
            {
                "model": self.model,
                "stream": self.stream is True,
                "messages": self._messages(),
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

# SPDX-License-Identifier: Apache-2.0
"""Requests of Anthropic's /v1/messages, and how they become chat requests.

As in `requests.openai`, an unsupported field that could change an answer is refused.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag

from flownpu.serve.requests.openai import ChatRequest, Items, Most, Number, Portion, Stop, Strict
from flownpu.serve.requests.validation import validated

USUAL_EFFORT = "high"
"""The effort of a request without one, by Anthropic's API."""


class Text(Strict):
    """A text."""

    type: Literal["text"]
    text: str


class ImageFile(Strict):
    """An image's file in base64."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/[\w.+-]+$")]
    data: str


class ImageAddress(Strict):
    """An image's URL; only "data:image/...;base64,..." is taken."""

    type: Literal["url"]
    url: str


class Image(Strict):
    """An image."""

    type: Literal["image"]
    source: Annotated[ImageFile | ImageAddress, Field(discriminator="type")]


class PlainText(Strict):
    """A document's text."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class NoCitations(Strict):
    """Says that the answer need not cite; this server's models cannot."""

    enabled: Literal[False]


class Document(Strict):
    """A document; PDF is not read."""

    type: Literal["document"]
    source: PlainText
    title: str | None = None
    context: str | None = None
    citations: NoCitations | None = None


Parts = str | Items[Annotated[Text | Image | Document, Field(discriminator="type")]]


class ToolUse(Strict):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Strict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Parts = ""
    is_error: bool | None = None
    """The content says it as well."""


class Thinking(Strict):
    """The thoughts of an earlier answer; this server signs none."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinking(Strict):
    """Thoughts of another server, in a form that only it reads; they are dropped."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    Text | Image | Document | ToolUse | ToolResult | Thinking | RedactedThinking, Field(discriminator="type")
]


class Turn(Strict):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class BuiltInTool(Strict):
    """A tool that Anthropic's server runs, or that its models were trained with; it is left out."""

    model_config = ConfigDict(extra="ignore")

    type: str
    name: str = ""


def _tool_kind(tool: Any) -> str:
    # A client may send a list as the type, which cannot be hashed: so a tuple, not a set.
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") else "built-in"


AnyTool = Annotated[Annotated[Tool, Tag("custom")] | Annotated[BuiltInTool, Tag("built-in")], Discriminator(_tool_kind)]


class ToolChoice(Strict):
    """Whether the model calls a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> Any:
        """The choice as OpenAI's field."""
        named = {"type": "function", "function": {"name": self.name or ""}}
        return {"any": "required", "tool": named}.get(self.type, self.type)


class ThinkingChoice(Strict):
    """Whether the model thinks. `max_tokens` bounds thoughts as well, and there is no other budget."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None
    """Whether thoughts are in the answer; they are never summarised."""


class JsonFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """The form of the answer, and how long the model thinks."""

    effort: Annotated[str, Field(pattern=r"^[a-z]{1,16}$")] | None = None
    format: JsonFormat | None = None


def _ends_with_user(turns: list[Turn]) -> list[Turn]:
    if turns and turns[-1].role == "assistant":
        raise ValueError("the last turn is the model's own, and this server does not continue turns: end with a user's")
    return turns


class CountRequest(Strict):
    """The fields of /v1/messages/count_tokens."""

    model: str
    messages: Annotated[
        list[Turn], Field(min_length=1, max_length=100_000, fail_fast=True), AfterValidator(_ends_with_user)
    ]
    system: str | Items[Text] | None = None
    tools: Items[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None
    # How another server shortens a conversation that is too long, and runs tools.
    context_management: dict[str, Any] | None = None
    container: None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def left_out(self) -> list[str]:
        """The types of tools that the model is not told of."""
        return [tool.type for tool in self.tools or [] if isinstance(tool, BuiltInTool)]

    def fields(self) -> dict[str, Any]:
        """These fields as those of a chat."""
        tools = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in self.tools or []
            if isinstance(tool, Tool)
        ]
        choice, output = self.tool_choice, self.output_config or OutputConfig()
        form = None
        if output.format is not None:
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": output.format.schema_}}
        thinks = {"enabled": True, "disabled": False}.get(self.thinking.type) if self.thinking else None
        return {
            "model": self.model,
            "messages": self._messages(),
            "tools": tools or None,
            "tool_choice": choice.choice() if choice else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "enable_thinking": thinks,
            "reasoning_effort": None if output.effort == USUAL_EFFORT or thinks is False else output.effort,
            "response_format": form,
        }

    def request(self) -> ChatRequest:
        """A chat whose answer has no tokens: its prompt is counted."""
        return validated(ChatRequest, {**self.fields(), "max_tokens": 0})

    def _messages(self) -> list[dict[str, Any]]:
        system = self.system if isinstance(self.system, str) else "\n".join(part.text for part in self.system or [])
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        turns: list[tuple[str, list[Any]]] = []
        for turn in self.messages:
            blocks = [Text(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
            if turns and turns[-1][0] == turn.role:  # such turns are one, which chat templates require
                turns[-1][1].extend(blocks)
            else:
                turns.append((turn.role, list(blocks)))
        for role, blocks in turns:
            messages += _documents(role, blocks)
        return messages


class MessagesRequest(CountRequest):
    """The fields of /v1/messages."""

    max_tokens: Most
    stream: bool = False
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_p: Portion | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stop_sequences: Stop = None

    @property
    def shows_thoughts(self) -> bool:
        """Whether thoughts are in the answer."""
        return self.thinking is None or self.thinking.display != "omitted"

    def request(self) -> ChatRequest:
        """The request as one for a chat."""
        same = self.model_dump(include={"max_tokens", "stream", "temperature", "top_p", "top_k"})
        return validated(ChatRequest, {**self.fields(), **same, "stop": self.stop_sequences})


def _documents(role: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """The blocks of a turn as turns of a chat: results of calls are turns by themselves, before the user's words."""
    found: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(block.content)}
        for block in blocks
        if isinstance(block, ToolResult)
    ]
    content = _content([block for block in blocks if isinstance(block, Text | Image | Document)])
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
        for block in blocks
        if isinstance(block, ToolUse)
    ]
    thoughts = "\n".join(block.thinking for block in blocks if isinstance(block, Thinking))
    if content or calls or not found:
        turn: dict[str, Any] = {"role": role, "content": content}
        turn |= {"tool_calls": calls} if calls else {}
        turn |= {"reasoning_content": thoughts} if thoughts else {}
        found.append(turn)
    return found


def _content(parts: Any) -> Any:
    """A text, or its parts if some are images."""
    if isinstance(parts, str):
        return parts
    written = [_part(part) for part in parts]
    if any(part["type"] != "text" for part in written):
        return written
    return "\n".join(part["text"] for part in written)


def _part(part: Text | Image | Document) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Document):
        lines = filter(None, (part.title, part.context, part.source.data))
        return {"type": "text", "text": "\n".join(lines)}
    source = part.source
    url = source.url if isinstance(source, ImageAddress) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}

# SPDX-License-Identifier: Apache-2.0
"""The turns of a conversation as a model's chat template takes them, and the images in them."""

import base64
import binascii
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flownpu.errors import FlowNPUError
from flownpu.generate.answer_format import AnswerFormat, format_of
from flownpu.generate.chat_template import ChatTemplate
from flownpu.generate.image_prompts import read_image_data
from flownpu.generate.turns import text_of
from flownpu.model.folder import read_genai_config, read_json
from flownpu.serve.errors import invalid, not_loaded
from flownpu.serve.grammars.form import Marks, offered
from flownpu.serve.requests.openai import ChatRequest, ImagePart, Message
from flownpu.serve.template_variables import SWITCHES, template_variables
from flownpu.serve.tools import CallFormat

DATA_URL = re.compile(r"data:image/[\w.+*-]+;base64,(.*)", re.DOTALL)


@dataclass
class Conversation:
    """A request's turns, as the model's chat template takes them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    """Functions for the template; empty if the template does not write tools."""
    variables: dict[str, Any] = field(default_factory=dict)
    """The template's variables that the request sets."""
    images: dict[str, bytes] = field(default_factory=dict)
    """Image files, by their place in the request, such as "messages.0.content.1.image_url"."""


@dataclass(frozen=True)
class ChatModel:
    """A model as its folder describes it, before it is loaded."""

    folder: Path

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template; false if there is none.

        Raises:
            ApiError: a file of it is damaged; the model cannot be loaded either.
        """
        try:
            return ChatTemplate.of(self.folder)
        except FlowNPUError as error:
            raise not_loaded(self.folder.name, error) from error

    @cached_property
    def calls(self) -> CallFormat:
        """How the model writes calls of functions."""
        try:
            return CallFormat.of_template(self.template.text(tools=True))
        except FlowNPUError as error:  # only templates of other names exist
            raise invalid(str(error)) from error

    @cached_property
    def format(self) -> AnswerFormat | None:
        """How the model marks its thoughts and calls; None: it marks none, or calls as `calls` says."""
        try:
            return format_of(self.template.text(tools=True))
        except FlowNPUError:  # only templates of other names exist
            return None

    @cached_property
    def thought_field(self) -> str:
        """The field of a turn in which the template reads its thoughts: gpt-oss's has another name for it."""
        text = self.template.text(tools=True) if self.format else ""
        return "thinking" if "thinking" in text and "reasoning_content" not in text else "reasoning_content"

    @cached_property
    def _special(self) -> frozenset[str]:
        """The names of the tokenizer's special tokens."""
        added = read_json(self.folder / "tokenizer.json").get("added_tokens") or []
        return frozenset(token["content"] for token in added if token.get("special"))

    def marks(self, conversation: "Conversation") -> Marks | None:
        """The marks of thoughts and calls in the answer to a conversation; None: there are none."""
        if self.format is None:
            return None
        thinks = not any(conversation.variables.get(name) is False for name in SWITCHES)
        text = self.template.text(tools=bool(conversation.tools))
        return Marks(self.format, self.format.begins(text, thinks=thinks), self.format.special & self._special)

    @cached_property
    def takes_images(self) -> bool:
        """Whether the model takes images."""
        return "vision" in read_genai_config(self.folder)["model"]

    def conversation(self, request: ChatRequest, most_images: int) -> Conversation:
        """A request's turns for the chat template.

        Raises:
            ApiError: an image's URL is no base64 data URL, there are more than `most_images`, or the model takes none;
                or the chat template does not read what the request sets in it.
        """
        tools = offered(request)
        knows = self.calls.template_knows_tools
        described = [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in tools]
        described = described if knows else []
        variables = template_variables(request, self.template, tools=bool(described))
        conversation = Conversation([], described, variables)
        for number, message in enumerate(request.messages):
            self._add(conversation, message, f"messages.{number}")
        if tools and self.calls.tools_in_system:
            functions = [tool.model_dump(exclude_none=True) for tool in tools]
            _system(conversation.messages)["tools"] = json.dumps(functions)
        elif tools and not knows:
            _instruct(conversation.messages, self.calls.instruction(tools))
        if len(conversation.images) > most_images:
            raise invalid(
                f"the conversation has {len(conversation.images)} images, and this server takes {most_images}",
                "messages",
            )
        if conversation.images and not self.takes_images:
            raise invalid(f"the model {self.folder.name} takes no images", "messages")
        return conversation

    def read_images(self, conversation: Conversation) -> list[Any]:
        """The images of a conversation, decoded; slow, so not for the event loop's thread.

        Raises:
            ApiError: an image cannot be decoded.
        """
        if not conversation.images:
            return []
        try:
            return list(read_image_data(self.folder, conversation.images))
        except FlowNPUError as error:
            raise invalid(str(error), "messages") from error

    def _add(self, conversation: Conversation, message: Message, place: str) -> None:
        role = "system" if message.role == "developer" else message.role
        content = _content(conversation, message, place)
        turn: dict[str, Any] = {"role": role, "content": content}
        if message.reasoning_content is not None:
            turn[self.thought_field] = message.reasoning_content
        if self.calls.template_knows_tools:
            if message.tool_calls:
                turn["tool_calls"] = [
                    {"id": self.calls.call_id(call.id), **_call(call.function.name, call.function.arguments)}
                    for call in message.tool_calls
                ]
                # OpenAI's clients leave the content beside calls empty in three ways, which all mean no content.
                turn["content"] = content or None
            if message.name is not None:
                turn["name"] = message.name
            if message.tool_call_id is not None:
                turn["tool_call_id"] = self.calls.call_id(message.tool_call_id)
        elif message.tool_calls:
            # The form that `CallFormat.instruction` asks of the model.
            key = self.calls.arguments
            texts = [
                f'{{"name": {json.dumps(call.function.name)}, "{key}": {call.function.arguments}}}'
                for call in message.tool_calls
            ]
            turn["content"] = "\n".join(filter(None, [text_of(content), *texts]))
        elif role == "tool" and not self.calls.tools_in_system:
            turn = {"role": "user", "content": f"The function's result: {text_of(content)}"}
            last = conversation.messages[-1] if conversation.messages else None
            if (
                last is not None and last["role"] == "user"
            ):  # results of several calls: templates require alternating turns
                last["content"] = f"{text_of(last['content'])}\n{turn['content']}"
                return
        conversation.messages.append(turn)


def _call(name: str, arguments: str) -> dict[str, Any]:
    """A call as chat templates read it: its arguments are an object, not text in JSON."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = arguments
    return {"type": "function", "function": {"name": name, "arguments": value}}


def _content(conversation: Conversation, message: Message, place: str) -> str | list[dict[str, Any]]:
    """A turn's text, or its parts as chat templates read them; adds the images to the conversation."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(message.content):
        if isinstance(part, ImagePart):
            name = f"{place}.content.{number}.image_url"
            conversation.images[name] = image_bytes(part.image_url.url, name)
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": part.text})
    return parts


def image_bytes(url: str, place: str) -> bytes:
    """The file in a data URL; `place` is the field of the request that holds the URL.

    Raises:
        ApiError: it is another kind of URL, or its base64 is broken.
    """
    match = DATA_URL.fullmatch(url)
    if match is None:
        raise invalid(
            f'{place}: expected an image as "data:image/...;base64,...", got {url[:40]!r}: this server fetches nothing',
            place,
        )
    try:
        return base64.b64decode(match[1], validate=True)
    except binascii.Error as error:
        raise invalid(f"{place}: the image's base64 is broken: {error}", place) from error


def _instruct(messages: list[dict[str, Any]], text: str) -> None:
    """Puts an instruction into the system turn, which is added if there is none."""
    turn = _system(messages)
    turn["content"] = f"{text_of(turn['content'])}\n\n{text}" if turn["content"] else text


def _system(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The system turn, which is added if there is none."""
    if not messages or messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": ""})
    return messages[0]

# SPDX-License-Identifier: Apache-2.0
"""The chat templates of a model folder, which write a conversation in the form of the model's training."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flownpu.errors import FlowNPUError, check_installed
from flownpu.generate.template_process import TemplateProcesses
from flownpu.model.folder import chat_templates, special_tokens

DEFAULT, TOOL_USE = "default", "tool_use"
"""The names by which transformers chooses: TOOL_USE, if there is one, for conversations with tools."""


@dataclass(frozen=True)
class ChatTemplate:
    """A folder's chat templates by name, and the special tokens that they may write."""

    folder: Path
    texts: Mapping[str, str]
    tokens: Mapping[str, str]
    """Such as {"bos_token": "<s>"}."""

    @classmethod
    def of(cls, folder: Path) -> "ChatTemplate":
        """Reads a folder's templates.

        Raises:
            FlowNPUError: a file is not UTF-8 or not JSON.
        """
        return cls(folder, chat_templates(folder), special_tokens(folder))

    def __bool__(self) -> bool:
        """Whether there is any template."""
        return any(self.texts.values())

    def text(self, *, tools: bool) -> str:
        """The template that transformers takes for a conversation, with tools or without; empty if there is none.

        Raises:
            FlowNPUError: there are templates of other names only.
        """
        name = TOOL_USE if tools and TOOL_USE in self.texts else DEFAULT
        if name not in self.texts and self:
            raise FlowNPUError(
                f"{self.folder} has chat templates for {', '.join(sorted(self.texts))} and none for ordinary "
                "conversations: name one of them chat_template.jinja"
            )
        return self.texts.get(name, "")

    def variables(self, *, tools: bool) -> frozenset[str]:
        """The names that the template reads, such as "messages", "enable_thinking".

        Raises:
            FlowNPUError: it is not a template.
        """
        try:
            return _variables(self.text(tools=tools))
        except FlowNPUError as error:
            raise FlowNPUError(f"the chat template of {self.folder} cannot be read: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), **variables: Any) -> str:
        """A conversation as the template writes it, up to where the model's next reply begins.

        Args:
            messages: the turns as OpenAI's API has them; the arguments of their calls are objects.
            tools: functions that the model may call, as OpenAI's API describes them.
            variables: what else the template may read, such as enable_thinking.

        Raises:
            FlowNPUError: the template refuses the conversation, is none, or needs more time or memory than it may; or
                there is no template.
        """
        values = {**self.tokens, **variables}
        if not (template := self.text(tools=bool(tools))):
            raise FlowNPUError(f"{self.folder} has no chat template, or an empty one, and conversations need one")
        try:
            return str(_processes().ask("render", template=template, messages=messages, tools=tools, values=values))
        except FlowNPUError as error:
            raise FlowNPUError(f"the model's chat template does not take this conversation: {error}") from error

    def start(self) -> None:
        """Starts the rendering process, if there is a template, so that the first conversation need not wait for it."""
        if self:
            _processes().start()


@functools.lru_cache(16)
def _variables(template: str) -> frozenset[str]:
    return frozenset(_processes().ask("variables", template=template))


@functools.cache
def _processes() -> Any:
    """The processes that render this one's templates."""
    check_installed("jinja2", extra="genai", purpose="A chat template")
    processes = TemplateProcesses()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=processes.forget)
    return processes

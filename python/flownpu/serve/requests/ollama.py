# SPDX-License-Identifier: Apache-2.0
"""Requests of Ollama's API, and their conversion to OpenAI's.

As in `requests.openai`, an unsupported field that could change an answer is refused, unless its value asks for the
existing behaviour.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from flownpu.serve.errors import invalid
from flownpu.serve.requests.openai import (
    ChatRequest,
    CompletionRequest,
    Items,
    Number,
    Penalty,
    Portion,
    Repetition,
    Seed,
    Stop,
    Strict,
    Window,
)
from flownpu.serve.requests.validation import validated

RECENT = 64
"""Tokens that penalties count where a request does not say how many; Ollama's default."""


def _neutral(value: float) -> float:
    if value != 1:
        raise ValueError("this server does not do it: leave it out, or give 1")
    return value


Neutral = Annotated[Number, AfterValidator(_neutral)]


class OllamaOptions(Strict):
    """How an answer is made."""

    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_k: int | None = None
    top_p: Portion | None = None
    seed: Seed | None = None
    num_predict: int | None = None
    """Tokens of the answer; -1 and -2: as many as fit."""
    stop: Stop = None
    min_p: Portion | None = None
    repeat_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: Window | None = None
    """Tokens that the three penalties count; -1: all."""
    penalize_newline: Literal[True] | None = None
    typical_p: Neutral | None = None
    tfs_z: Neutral | None = None
    mirostat: Literal[0] | None = None
    # The following fields change no answer: the server's options decide, or the server has no use for them.
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    mirostat_tau: Number | None = None
    mirostat_eta: Number | None = None
    numa: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    low_vram: bool | None = None
    vocab_only: bool | None = None

    def fields(self) -> dict[str, Any]:
        """These options as OpenAI's fields."""
        most = self.num_predict if self.num_predict is not None and self.num_predict > 0 else None
        top_k = None if self.top_k is None else max(self.top_k, 0)
        seed = None if self.seed is None or self.seed < 0 else self.seed
        same = self.model_dump(include={"temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"})
        penalties = {
            "repetition_penalty": self.repeat_penalty,
            "repeat_last_n": RECENT if self.repeat_last_n is None else self.repeat_last_n,
        }
        return {**same, **penalties, "top_k": top_k, "seed": seed, "max_tokens": most, "stop": self.stop or None}


class OllamaFunction(Strict):
    """A function and its arguments."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None
    description: str | None = None


class OllamaCall(Strict):
    """A call that an earlier answer made."""

    id: str | None = None
    type: str | None = None
    index: int | None = None
    function: OllamaFunction


class OllamaMessage(Strict):
    """One turn."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Items[str] | None = None
    """Files in base64."""
    tool_calls: Items[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    thinking: str | None = None

    def document(self) -> dict[str, Any]:
        """The turn as OpenAI's object."""
        content: Any = self.content or ""
        if self.images:
            # The file itself shows the kind of image.
            parts = [{"type": "image_url", "image_url": {"url": f"data:image/*;base64,{one}"}} for one in self.images]
            content = [*parts, {"type": "text", "text": content}]
        document = {"role": self.role, "content": content}
        if self.tool_calls:
            document["tool_calls"] = [
                {
                    "id": call.id or "",
                    "function": {"name": call.function.name, "arguments": json.dumps(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.tool_name is not None:
            document["name"] = self.tool_name
        if self.thinking:
            document["reasoning_content"] = self.thinking
        if self.tool_call_id is not None:
            document["tool_call_id"] = self.tool_call_id
        return document


def _add_ids(messages: list[dict[str, Any]]) -> None:
    """Gives ids to calls that have none, and to their results: Ollama's clients may know calls by name and order only.

    An id has nine letters and digits, which every chat template takes.
    """
    open_calls: list[dict[str, Any]] = []
    count = 0
    for message in messages:
        for call in message.get("tool_calls", []):
            count += 1
            call["id"] = call["id"] or f"call{count:05d}"
            open_calls.append(call)
        if message["role"] != "tool" or not open_calls:
            continue
        known = [call for call in open_calls if call["id"] == message.get("tool_call_id")]
        named = [call for call in open_calls if call["function"]["name"] == message.get("name")]
        call = (known or named or open_calls)[0]
        open_calls.remove(call)
        message.setdefault("tool_call_id", call["id"])


class OllamaShared(Strict):
    """The fields of both kinds of requests."""

    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    num_predict: int | None = None
    """As that of `options`, in the place where Open WebUI puts it for a chat's title."""
    keep_alive: str | Number | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: Literal[False] | None = None
    truncate: bool | None = None
    shift: bool | None = None

    def fields(self) -> dict[str, Any]:
        """These fields as OpenAI's, without the tag that Ollama adds to a model's name."""
        form = None
        if isinstance(self.format, dict):
            form = {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
        elif self.format == "json":
            form = {"type": "json_object"}
        options = self.options.fields() if self.options else {}
        if self.num_predict is not None and self.num_predict > 0 and options.get("max_tokens") is None:
            options["max_tokens"] = self.num_predict
        same = {"model": self.model.removesuffix(":latest"), "stream": self.stream is not False}
        return {**same, "response_format": form, **options}

    @property
    def unloads(self) -> bool:
        """Whether the model is to be closed after the answer."""
        return str(self.keep_alive) in {"0", "0.0", "0s", "0m", "0h"}

    def thinking(self) -> dict[str, Any]:
        """Whether the model thinks, and how long, as fields of OpenAI and other servers."""
        return {"enable_thinking" if isinstance(self.think, bool) else "reasoning_effort": self.think}


class OllamaChat(OllamaShared):
    """The fields of /api/chat."""

    messages: list[OllamaMessage] = Field(default_factory=list, fail_fast=True)
    tools: Items[dict[str, Any]] | None = None

    def request(self) -> ChatRequest:
        """The request as one of OpenAI's API.

        Raises:
            ApiError: a tool is not one.
        """
        messages = [message.document() for message in self.messages]
        _add_ids(messages)
        return validated(ChatRequest, {**self.fields(), **self.thinking(), "messages": messages, "tools": self.tools})


class OllamaGenerate(OllamaShared):
    """The fields of /api/generate."""

    prompt: str = ""
    system: str | None = None
    images: Items[str] | None = None
    raw: bool | None = None
    """The prompt is taken as it is."""
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: None = None

    def request(self) -> ChatRequest | CompletionRequest:
        """The request as one of OpenAI's API.

        Raises:
            ApiError: a prompt that is taken as it is has a format or images.
        """
        fields = self.fields()
        if self.raw:
            if fields.pop("response_format") is not None or self.images or self.think:
                raise invalid("raw prompts have no format, no images and no thinking", "raw")
            return validated(CompletionRequest, {**fields, "prompt": self.prompt})
        messages = [OllamaMessage(role="user", content=self.prompt, images=self.images)]
        if self.system:
            messages.insert(0, OllamaMessage(role="system", content=self.system))
        documents = [message.document() for message in messages]
        return validated(ChatRequest, {**fields, **self.thinking(), "messages": documents})


class OllamaShow(Strict):
    """The fields of /api/show."""

    model: str
    verbose: bool | None = None

# SPDX-License-Identifier: Apache-2.0
"""Requests of OpenAI's API: the fields that the server knows, their types and bounds.

An unsupported field that could change an answer is refused, unless its value asks for the existing behaviour. `HINTS`
change no answer. Other unknown fields are an error.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from flownpu.generate.language_model import Sampling
from flownpu.generate.penalties import Penalties

HINTS = frozenset(
    # About caches, bills and records,
    "cache_control cache_prompt client_metadata inference_geo max_tool_calls metadata "  # noqa: SIM905
    "prediction prompt_cache_key prompt_cache_options "
    "prompt_cache_retention safety_identifier service_tier speed store user verbosity "
    # from an answer that a client sends back with the conversation,
    "annotations caller citations parsed parsed_arguments phase provider_specific_fields refusal "
    # about tools and images.
    "allowed_callers defer_loading detail eager_input_streaming input_examples".split()
)
"""Fields that change no answer of this server, whatever object of a request has them, and whatever their value is."""


Kind = TypeVar("Kind")
Items = Annotated[list[Kind], Field(fail_fast=True)]
"""A list whose first wrong item is enough for the message: errors take a hundred times an item's memory."""


class Strict(BaseModel):
    """Refuses unknown fields, and numbers in place of a text; drops `HINTS` that it has no field for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_hints(cls, value: Any) -> Any:
        if not isinstance(value, dict) or HINTS.isdisjoint(value):
            return value
        return {key: each for key, each in value.items() if key not in HINTS or key in cls.model_fields}


class TextPart(Strict):
    """A part of a message that is text."""

    type: Literal["text", "input_text", "output_text"] = "text"
    text: str


class ImageUrl(Strict):
    """The URL of an image; only "data:image/...;base64,..." is taken."""

    url: str


class ImagePart(Strict):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class CalledFunction(Strict):
    """A function's name and its arguments, an object in JSON."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """The thoughts of an answer, which clients may send back with the conversation."""
    audio: None = None
    function_call: None = None


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may use; all tools are functions."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """Names a function."""

    name: str


class NamedTool(Strict):
    """The one function that the model must call."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Strict):
    """A schema and its name."""

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StreamOptions(Strict):
    """The additions to a stream of an answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


def _unbounded(value: Any) -> Any:
    """More than fit, for -1: so clients of llama.cpp ask for as many tokens as fit."""
    return ALL if value == -1 else value


Most = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_unbounded)]
"""Most tokens of an answer; 0: the prompt is only checked and counted. None: as many as fit."""
Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]
Stop = str | Annotated[list[str], Field(max_length=16, fail_fast=True)] | None
Penalty = Annotated[Number, Field(ge=-2, le=2)]
"""OpenAI's bounds."""
Repetition = Annotated[Number, Field(ge=0.01, le=100)]
"""The divisor of logits; the bounds keep them finite."""
Portion = Annotated[Number, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Token = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""A token's number, as a text."""
Window = Annotated[int, Field(ge=-1)]
"""How many of the last tokens the penalties count; -1: all."""
ALL = 2**31
"""More tokens than any context has."""


class Shared(Strict):
    """The fields of completions of both kinds."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Most = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Portion | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """A field of other servers, not of OpenAI's API; 0 and -1: all tokens."""
    seed: Seed | None = None
    stop: Stop = None
    n: Annotated[int, Field(ge=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[Number, Field(ge=-100, le=100)]] | None = (
        None
    )
    """Biases by the numbers of tokens."""
    # Fields of other servers, not of OpenAI's API: vLLM's, and the last one llama.cpp's.
    min_p: Portion | None = None
    repetition_penalty: Repetition | None = None
    repeat_last_n: Window | None = None

    def sampling(self) -> Sampling:
        """How tokens are chosen; GenAI's seeds have 31 bits."""
        seed = None if self.seed is None else self.seed % 2**31
        top_k = None if self.top_k is None else max(self.top_k, 0)
        return Sampling(self.temperature, top_k, self.top_p, seed, self._penalties())

    def _penalties(self) -> Penalties:
        bias = tuple((int(token), value) for token, value in (self.logit_bias or {}).items())
        last, repetition, min_p = self.repeat_last_n, self.repetition_penalty, self.min_p or 0.0
        if last == 0:  # no token counts
            return Penalties(bias, None if repetition is None else 1.0, min_p=min_p)
        window = ALL if last == -1 else last
        return Penalties(
            bias, repetition, self.frequency_penalty or 0.0, self.presence_penalty or 0.0, min_p, window=window
        )

    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Shared):
    """The fields of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Most = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(pattern=r"^[a-z]{1,16}$")] | None = None
    # Fields of other servers, not of OpenAI's API.
    enable_thinking: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    """Variables for the chat template. 32 is three times what any public template reads."""
    modalities: Items[Literal["text"]] | None = None

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer; None: as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Shared):
    """The fields of /v1/completions."""

    # In a long list, the first wrong item is enough for the message.
    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    echo: bool | None = None
    """Whether the prompt comes before the answer, with `logprobs` of its own."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    suffix: None = None

    @field_validator("best_of")
    @classmethod
    def _keeps_all(cls, value: int | None, others: ValidationInfo) -> int | None:
        if value not in {None, others.data.get("n") or 1}:
            raise ValueError("this server answers with all that it computes: leave it out, or give n")
        return value

# SPDX-License-Identifier: Apache-2.0
"""The variables that a request sets in the chat template, such as whether the model thinks before it answers.

A wish that the template cannot meet is refused, unless it asks for the existing behaviour.
"""

import re
from typing import Any

from flownpu.errors import FlowNPUError
from flownpu.generate.chat_template import ChatTemplate
from flownpu.serve.errors import invalid
from flownpu.serve.requests.openai import ChatRequest

SWITCHES = ("enable_thinking", "thinking")
"""The names by which templates read whether the model shall think: Qwen's and GLM's; DeepSeek's and Granite's."""
EFFORT = "reasoning_effort"
"""The name by which the templates of gpt-oss and DeepSeek read how long the model shall think."""
USUAL_EFFORT = "medium"
"""OpenAI's default, which every template meets."""
THINKS = re.compile(r"</think>|\[/?THINK\]|<\|channel|<channel\|>|END_THINKING|</seed:think>|reasoning_content")
"""Texts in the templates of models that think: where thoughts begin or end, or the turn's field that holds them."""
NONE = re.compile(r"""["']none["']""")
"""An effort that some templates know: not to think."""
KEPT = ("messages", "tools", "add_generation_prompt", "continue_final_message", "self")
"""Variables that only the server sets; so are special tokens."""


def template_variables(request: ChatRequest, template: ChatTemplate, *, tools: bool) -> dict[str, Any]:
    """The variables that a request sets in the chat template, by name.

    Args:
        request: the request.
        template: the model's templates.
        tools: whether the template is given tools.

    Raises:
        ApiError: the template reads no such variable, cannot meet the wish, or is not a template; or two fields of the
            request contradict each other.
    """
    variables = dict(request.chat_template_kwargs or {})
    switch = _switch(request)
    if switch is None and not variables:
        return {}
    try:
        reads, text = template.variables(tools=tools), template.text(tools=tools)
    except FlowNPUError as error:
        raise invalid(str(error)) from error
    thinks = THINKS.search(text) is not None
    for name, value in variables.items():
        place = f"chat_template_kwargs.{name}"
        if name in KEPT or name.endswith("_token"):
            raise invalid(f"{place}: the server sets {name} itself: leave it out", place)
        if name not in reads and not (name in SWITCHES and value is False and not thinks):
            raise invalid(f"{place}: the model's chat template does not read {name}: leave it out", place)
    wish: dict[str, Any] = {}
    if switch is not None:
        wish = {name: switch for name in SWITCHES if name in reads}
        if EFFORT in reads and switch and request.reasoning_effort:
            wish[EFFORT] = request.reasoning_effort
        elif EFFORT in reads and not wish and NONE.search(text):
            wish |= {} if switch else {EFFORT: "none"}
        if not wish:
            _check_happens_anyway(request, reads, switch=switch, thinks=thinks)
    return wish | {name: value for name, value in variables.items() if name in reads}


def has_switch(template: ChatTemplate) -> bool:
    """Whether a request can choose whether the model thinks, or how long."""
    try:
        return not template.variables(tools=False).isdisjoint((*SWITCHES, EFFORT))
    except FlowNPUError:  # this template cannot write any conversation
        return False


def knows_thinking(template: ChatTemplate, *, tools: bool) -> bool:
    """Whether the model thinks, or a request can choose that it does; true where the template cannot say."""
    try:
        return has_switch(template) or THINKS.search(template.text(tools=tools)) is not None
    except FlowNPUError:  # the conversation's own error says why
        return True


def _switch(request: ChatRequest) -> bool | None:
    """Whether the model thinks; None leaves it to the model."""
    effort = None if request.reasoning_effort is None else request.reasoning_effort != "none"
    switch = request.enable_thinking
    if switch is not None and effort is not None and switch != effort:
        raise invalid(
            f"enable_thinking is {str(switch).lower()} and reasoning_effort {request.reasoning_effort}: leave one out",
            "reasoning_effort",
        )
    return effort if switch is None else switch


def _check_happens_anyway(request: ChatRequest, reads: frozenset[str], *, switch: bool, thinks: bool) -> None:
    """Raises ApiError if a wish that sets no variable asks for other than the existing behaviour."""
    effort = request.reasoning_effort
    place = "enable_thinking" if effort is None else "reasoning_effort"
    if not switch and thinks:
        raise invalid(f"{place}: the model's chat template has no switch that turns thinking off: leave it out", place)
    if switch and effort is None and not thinks and EFFORT not in reads:
        raise invalid(f"{place}: the model's chat template knows no thinking: leave it out", place)
    if switch and effort not in (None, USUAL_EFFORT):
        raise invalid(
            f"{place}: the model's chat template reads no effort: leave it out, or ask for {USUAL_EFFORT}", place
        )

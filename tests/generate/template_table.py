# SPDX-License-Identifier: Apache-2.0
"""Chat templates rendered here and by transformers, by name and feature.

`python -m tests.generate.template_table FOLDER` prints the second table of docs/use/chat-templates.md. FOLDER holds
templates as files NAME.jinja, such as those that come with llama.cpp, vLLM or TRL.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from flownpu.errors import FlowNPUError
from flownpu.generate.chat_template import ChatTemplate
from flownpu.generate.template_environment import PART

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
PROPERTIES = {
    "city": {"type": "string", "description": "Größe, 東京 & <b>"},
    "days": {"type": "integer", "description": "How many.", "minimum": 1, "default": 3},
    "units": {"type": "array", "description": "Of what.", "items": {"type": "string", "enum": ["°C", "K"]}},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": PARAMETERS}},
    {
        "type": "function",
        "function": {"name": "stop", "description": "Stops.", "parameters": {"type": "object", "properties": {}}},
    },
]


def said(role: str, content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def called(content: str | None, **arguments: dict[str, Any]) -> dict[str, Any]:
    """A turn with calls, whose ids are by nine characters, as Mistral's templates want them."""
    calls = [
        {"id": f"call{name:.5}"[:9].ljust(9, "0"), "type": "function", "function": {"name": name, "arguments": value}}
        for name, value in arguments.items()
    ]
    return said("assistant", content, tool_calls=calls)


def result(name: str, content: str) -> dict[str, Any]:
    return said("tool", content, name=name, tool_call_id=f"call{name:.5}"[:9].ljust(9, "0"))


ASK, ANSWER = said("user", "  How is it?\n"), said("assistant", "Fine.")
CALLS = {"weather": {"city": "Köln", "days": None, "units": ["K"]}, "stop": {}}
RESULTS = [result("weather", "3 °C"), result("stop", "ok")]
FEATURES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]] = {
    "plain": ([ASK], [], {}),
    "system": ([said("system", "Be\n\nbrief. "), ASK], [], {}),
    "turns": ([ASK, ANSWER, said("user", "And\t now?"), said("assistant", "  So so. "), ASK], [], {}),
    "unicode": ([said("user", "Ä 東京 🙂 {{ x }} {% if %} <|im_end|> \\n 'a' \"b\" </s>")], [], {}),
    "tools": ([said("system", "Be brief."), ASK], TOOLS, {}),
    "call": ([ASK, called(None, weather=CALLS["weather"]), result("weather", '{"t": 3}')], TOOLS, {}),
    "calls": ([ASK, called("I look.", **CALLS), *RESULTS, ANSWER, ASK], TOOLS, {}),
    "thought": ([ASK, said("assistant", "Fine.", reasoning_content="Hm.\n"), ASK], [], {}),
    "thinking on": ([ASK], [], {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    "thinking off": ([ASK], [], {"enable_thinking": False, "thinking": False}),
    "parts": ([said("user", [{"type": "text", "text": "How"}, {"type": "text", "text": " is it?"}])], [], {}),
    "image": ([said("user", [{"type": "image"}, {"type": "text", "text": "What is it?"}])], [], {}),
}
"""A conversation, tools and variables for each feature."""


def by_transformers(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers with a template."""
    tokenizer = Tokenizer(WordLevel({text: at for at, text in enumerate(TOKENS.values())}, "<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **TOKENS)


def compare(template: str) -> dict[str, str]:
    """For each feature: "equal", "refused" by both, "more" if only transformers refuses, or "differs".

    "form" is a text or a list of parts that the template itself does not read, and is given in the other form here.
    """
    reference = by_transformers(template)
    own = ChatTemplate(Path(), {"default": template}, TOKENS)
    found = {}
    for name, (messages, tools, variables) in FEATURES.items():
        try:
            expected = reference.apply_chat_template(
                messages, tools or None, add_generation_prompt=True, tokenize=False, **variables
            )
        except Exception as error:  # noqa: BLE001 whatever its template raises, transformers refuses
            expected = error
        try:
            got = own.render(messages, tools, **variables)
        except FlowNPUError as error:
            got = error
        if isinstance(expected, Exception):
            found[name] = "refused" if isinstance(got, Exception) else "more"
        else:
            found[name] = "equal" if got == expected else "form" if lost(expected, messages) else "differs"
    return found


def lost(text: str, messages: list[dict[str, Any]]) -> bool:
    """Whether a rendering lacks the last turn's text, or has Python's form, or JSON's, of its parts."""
    content = messages[-1]["content"]
    words = content if isinstance(content, str) else content[-1]["text"]
    return words.strip() not in text or PART.search(text) is not None


SIGNS = {"equal": "=", "more": "+", "form": "t", "refused": "–", "differs": "DIFFERS"}


def main(folder: Path) -> None:
    """Prints each template's outcomes that are not equal, and how often each outcome occurs, by feature."""
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in FEATURES}
    templates = {path.read_text(encoding="utf-8"): path.stem for path in sorted(folder.glob("*.jinja"))}
    for template, name in templates.items():
        found = compare(template)
        print(name, {feature: word for feature, word in found.items() if word != "equal"}, flush=True)
        for feature, word in found.items():
            outcomes[feature][SIGNS[word]] += 1
    print(f"\n| feature | {' | '.join(SIGNS.values())} |\n|---|{'--:|' * len(SIGNS)}")
    for feature, counts in outcomes.items():
        print(f"| {feature} | {' | '.join(str(counts[sign] or '') for sign in SIGNS.values())} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

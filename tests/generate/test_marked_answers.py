# SPDX-License-Identifier: Apache-2.0
"""Thoughts and calls of marked answers in the documents of the APIs: streamed and whole give the same."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from flownpu.generate import tokenizer
from flownpu.generate.answer_format import format_of
from flownpu.generate.conversation import Conversation
from flownpu.generate.language_model import Timing
from flownpu.generate.worker import Finished, Piece
from flownpu.serve.chat_prompts import ChatModel
from flownpu.serve.metrics import Times
from flownpu.serve.requests.openai import ChatRequest
from flownpu.serve.routes import ollama, openai
from flownpu.serve.service import Chat
from tests.generate.test_answer_format import CASES, WEATHER

TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in WEATHER.items()]


def request(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "Weather?"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, "tools": TOOLS, **fields})


class Written:
    """Answers whose text is given, a few letters at a time."""

    def __init__(self, text: str) -> None:
        self.questions, self.name = [None], "m"
        self.settings = SimpleNamespace(logs_texts=False)
        self.times, self.prompt_tokens = [Times(0.0)], 3
        self.finished = {0: Finished("stop", 3, 5, 0)}
        self._text = text

    async def __aiter__(self) -> Any:
        for at in range(0, len(self._text), 3):
            yield 0, Piece(self._text[at : at + 3], 1)
        yield 0, self.finished[0]

    def end(self) -> None:
        pass


def chat_of(case: str) -> Chat:
    template, text, *_ = CASES[case]
    form = format_of(template)
    assert form is not None
    return Chat(Written(text), None, form, form.begins(template, thinks=True), WEATHER)


async def all_of(stream: Any) -> list[dict[str, Any]]:
    return [document async for document in stream]


@pytest.mark.parametrize("case", ["harmony", "gemma", "xml, opened by the template", "harmony, final"])
def test_streams_and_whole_answers_of_both_apis_are_equal(case: str) -> None:
    _, _, said, calls = CASES[case]
    whole = asyncio.run(openai.chat_completion(chat_of(case), request()))["choices"][0]
    message = whole["message"]
    assert message["content"] == said.text
    assert message.get("reasoning_content", "") == said.thought
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert made == calls
    assert whole["finish_reason"] == ("tool_calls" if calls else "stop")

    chunks = [
        one["choices"][0] for one in asyncio.run(all_of(openai._chat_chunks(chat_of(case), request(stream=True))))
    ]
    for key, expected in (("content", said.text), ("reasoning_content", said.thought)):
        assert "".join(chunk["delta"].get(key) or "" for chunk in chunks) == expected
    streamed = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in streamed] == calls
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]

    lines = asyncio.run(all_of(ollama._documents(chat_of(case), "m", ollama._message)))
    joined = asyncio.run(ollama._whole(ollama._documents(chat_of(case), "m", ollama._message)))
    for key, expected in (("content", said.text), ("thinking", said.thought)):
        assert "".join(line["message"].get(key, "") for line in lines) == expected
        assert joined["message"].get(key, "") == expected
    found = [
        (call["function"]["name"], call["function"]["arguments"]) for call in joined["message"].get("tool_calls", [])
    ]
    assert found == [(name, json.loads(arguments)) for name, arguments in calls]


def test_marks_that_are_special_tokens_are_text_of_such_models_alone(tmp_path: Any) -> None:
    names = ["<|channel|>", "<|message|>", "<|end|>", "<|other|>"]
    made = Tokenizer(models.BPE(vocab={"hello": 0}, merges=[]))
    made.add_special_tokens([AddedToken(name, special=True) for name in names])
    made.save(str(tmp_path / "tokenizer.json"))
    tokens = [made.token_to_id(name) for name in names]
    assert [tokenizer.Tokenizer(tmp_path).bytes_of(token) for token in tokens] == [b""] * 4
    (tmp_path / "chat_template.jinja").write_text("<|start|>{{ messages }}<|channel|>")
    found = [tokenizer.Tokenizer(tmp_path).bytes_of(token) for token in tokens]
    assert found == [b"<|channel|>", b"<|message|>", b"<|end|>", b""]


def test_thoughts_go_back_in_the_field_that_the_template_reads(tmp_path: Any) -> None:
    asked = request(
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "hm"}]
    )
    for template, field in (
        ("<|channel|>{{ messages }}{{ message.thinking }}{{ tools }}", "thinking"),
        ("<function=x>{{ message.reasoning_content }}{{ enable_thinking }}{{ tools }}", "reasoning_content"),
        ("{{ message.thinking }}{{ tools }}", "reasoning_content"),
    ):
        folder = tmp_path / field / str(len(template))
        folder.mkdir(parents=True)
        (folder / "chat_template.jinja").write_text(template)
        (folder / "genai_config.json").write_text('{"model": {"type": "x"}}')
        turns = ChatModel(folder).conversation(asked, 0).messages
        assert turns[-1][field] == "hm"


def test_chat_shows_and_keeps_no_thoughts() -> None:
    template, answer, said, _ = CASES["harmony"]
    asked: list[list[dict[str, str]]] = []

    def tokens_of_conversation(messages: list[dict[str, str]]) -> list[int]:
        asked.append(messages)
        return [1]

    model = SimpleNamespace(
        chat_template=template,
        tokens_of_conversation=tokens_of_conversation,
        stream=lambda *_: iter([answer[at : at + 3] for at in range(0, answer.index("commentary to="), 3)]),
    )
    talk = object.__new__(Conversation)
    talk.model, talk.context, talk.messages, talk.images = model, 9, [], []
    talk._cached = SimpleNamespace(resume=lambda *_: (None, [], []))
    assert "".join(talk.reply("Weather?", Timing())) == said.text
    "".join(talk.reply("And now?", Timing()))
    assert asked[-1][1] == {"role": "assistant", "content": said.text}

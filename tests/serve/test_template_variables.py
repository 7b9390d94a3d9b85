# SPDX-License-Identifier: Apache-2.0
"""Variables of the chat template that requests set, in each API; and slow prompts beside other requests."""

import json
import queue
import shutil
import threading
from multiprocessing import Pipe

import numpy as np
import pytest

from flownpu.generate.chat_template import ChatTemplate
from flownpu.generate.worker import Finished
from flownpu.serve.errors import ApiError
from flownpu.serve.processes.host import _Host
from flownpu.serve.processes.protocol import Question
from flownpu.serve.requests.ollama import OllamaChat, OllamaGenerate
from flownpu.serve.requests.openai import ChatRequest
from flownpu.serve.requests.responses import ResponsesRequest
from flownpu.serve.template_variables import template_variables

MESSAGES = [{"role": "user", "content": "Tell."}]
# Templates of models that may think, always think, and never think.
QWEN = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
DEEPSEEK = "{% if thinking %}<think>{% else %}</think>{% endif %}"
GPT_OSS = "Reasoning: {{ reasoning_effort or 'medium' }}<|channel|>"
MISTRAL = "{% if reasoning_effort != 'none' %}[THINK]{% endif %}"
BOTH = QWEN + GPT_OSS
ALWAYS = "{{ messages[0].content.split('</think>')[-1] }}"
NEVER = "{{ messages[0].content }}"


def variables(text, **fields):
    request = ChatRequest.model_validate({"model": "m", "messages": MESSAGES, **fields})
    return template_variables(request, ChatTemplate(None, {"default": text}, {}), tools=False)


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        (QWEN, {}, {}),
        (QWEN, {"enable_thinking": False}, {"enable_thinking": False}),
        (QWEN, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (QWEN, {"reasoning_effort": "low"}, {"enable_thinking": True}),
        (QWEN, {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (QWEN, {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": 0}}, {"enable_thinking": 0}),
        (DEEPSEEK, {"enable_thinking": True}, {"thinking": True}),
        (DEEPSEEK, {"chat_template_kwargs": {"thinking": True}}, {"thinking": True}),
        (GPT_OSS, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (GPT_OSS, {"enable_thinking": True}, {}),
        (MISTRAL, {"enable_thinking": False}, {"reasoning_effort": "none"}),
        (BOTH, {"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
        (BOTH, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        # Wishes for what happens anyway.
        (ALWAYS, {"enable_thinking": True}, {}),
        (ALWAYS, {"reasoning_effort": "medium"}, {}),
        (NEVER, {"enable_thinking": False}, {}),
        (NEVER, {"reasoning_effort": "none"}, {}),
        (NEVER, {"reasoning_effort": "medium"}, {}),
        (NEVER, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}, {}),
        (
            "{{ documents }}{{ x }}",
            {"chat_template_kwargs": {"documents": [], "x": {"a": 1}}},
            {"documents": [], "x": {"a": 1}},
        ),
    ],
)
def test_reasoning_wish_becomes_template_variables(text, fields, expected):
    assert variables(text, **fields) == expected


@pytest.mark.parametrize(
    ("text", "fields", "parameter"),
    [
        (GPT_OSS, {"enable_thinking": False}, "enable_thinking"),
        (GPT_OSS, {"reasoning_effort": "none"}, "reasoning_effort"),
        (ALWAYS, {"enable_thinking": False}, "enable_thinking"),
        (ALWAYS, {"reasoning_effort": "high"}, "reasoning_effort"),
        (ALWAYS, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        (NEVER, {"enable_thinking": True}, "enable_thinking"),
        (NEVER, {"reasoning_effort": "low"}, "reasoning_effort"),
        (NEVER, {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        (QWEN, {"enable_thinking": False, "reasoning_effort": "low"}, "reasoning_effort"),
        (QWEN, {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        (NEVER, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ("{{ tools }}", {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ("{{ bos_token }}", {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
        ("{{ range(2) }}", {"chat_template_kwargs": {"range": 1}}, "chat_template_kwargs.range"),
        ("{% if %}", {"enable_thinking": False}, None),
    ],
)
def test_unfulfillable_reasoning_wish_is_refused(text, fields, parameter):
    with pytest.raises(ApiError) as refused:
        variables(text, **fields)
    assert (refused.value.status, refused.value.parameter) == (400, parameter)


@pytest.mark.parametrize("effort", ["", "high\n<|end|>", "High", "x" * 17])
def test_effort_of_several_words_is_refused(effort):
    """Templates write it into the prompt."""
    with pytest.raises(ValueError, match="reasoning_effort"):
        ChatRequest.model_validate({"model": "m", "messages": MESSAGES, "reasoning_effort": effort})


@pytest.mark.parametrize("kind", [OllamaChat, OllamaGenerate])
@pytest.mark.parametrize(
    ("think", "switch", "effort"), [(None, None, None), (False, False, None), (True, True, None), ("low", None, "low")]
)
def test_ollama_think_becomes_reasoning_wish(kind, think, switch, effort):
    fields = {"messages": MESSAGES} if kind is OllamaChat else {"prompt": "Tell."}
    request = kind.model_validate({"model": "m", "think": think, **fields}).request()
    assert (request.enable_thinking, request.reasoning_effort) == (switch, effort)


def test_responses_reasoning_becomes_effort():
    fields = {"model": "m", "input": "Tell.", "reasoning": {"effort": "low", "summary": "auto"}}
    assert ResponsesRequest.model_validate(fields).request().reasoning_effort == "low"


@pytest.fixture(scope="module")
def server(start_server, topics, tmp_path_factory):
    """A thinking model, recognised by its many tokens. Its template refuses conversations that begin with "no"."""
    folder = tmp_path_factory.mktemp("thinking") / "thinking"
    shutil.copytree(topics, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content }})"
        "{% endif %}{% endfor %}"
        "{% if messages[0].content == 'no' %}{{ raise_exception('Not so.') }}{% endif %}"
        "{% if enable_thinking is not defined or enable_thinking %}<think>{{ 'think. ' * 40 }}</think>{% endif %}"
    )
    return start_server(folder, topics, "--slots", 2)


@pytest.fixture(scope="module")
def prompt_tokens(server):
    def prompt_tokens(path, **fields):
        with server.http() as http:
            response = http.post(path, json={"model": "thinking", "stream": False, **fields})
        assert response.status_code == 200, response.text
        body = response.json()
        usage = body.get("usage", {})
        return body.get("prompt_eval_count") or usage.get("prompt_tokens") or usage["input_tokens"]

    return prompt_tokens


@pytest.mark.parametrize(
    ("path", "fields", "off"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, {"reasoning_effort": "none"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, {"enable_thinking": False}),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_tokens": 1},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        ("/v1/responses", {"input": "Tell.", "max_output_tokens": 1}, {"reasoning": {"effort": "none"}}),
        ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 1}}, {"think": False}),
        ("/api/generate", {"prompt": "Tell.", "options": {"num_predict": 1}}, {"think": False}),
    ],
)
def test_thinking_is_turned_off_by_all_apis(prompt_tokens, path, fields, off):
    assert prompt_tokens(path, **fields) > 100
    assert prompt_tokens(path, **fields, **off) < 20


def test_earlier_thoughts_reach_template(prompt_tokens):
    """OpenAI-like clients send reasoning_content back, Ollama's thinking."""
    thought = "I ask myself how loops end, and when."
    for path, name, more in (
        ("/v1/chat/completions", "reasoning_content", {"max_tokens": 1, "enable_thinking": False}),
        ("/api/chat", "thinking", {"options": {"num_predict": 1}, "think": False}),
    ):
        turns = [*MESSAGES, {"role": "assistant", "content": "So."}, *MESSAGES]
        without = prompt_tokens(path, messages=turns, **more)
        turns[1] = {**turns[1], name: thought}
        assert prompt_tokens(path, messages=turns, **more) > without + 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chat_template_kwargs": {"x": 1}}, "does not read x"),
        ({"chat_template_kwargs": {str(i): i for i in range(33)}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "no"}]}, "does not take this conversation: Not so."),
        ({"messages": MESSAGES * 5000}, "has 5000 turns"),
    ],
)
def test_template_refusal_is_bad_request(server, fields, message):
    with server.http() as http:
        response = http.post("/v1/chat/completions", json={"model": "thinking", "messages": MESSAGES, **fields})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


class Worker:
    """Takes requests for a model whose chat template writes "slow" only when it may."""

    context_length = 100
    has_chat_template = True
    vocabulary_size = 10

    def __init__(self):
        self.model = self
        self.may = threading.Event()
        self.submitted = queue.Queue()

    def tokens_of_messages(self, messages, _tools, variables):
        if messages[0]["content"] == "slow":
            assert self.may.wait(60)
        return np.array([variables["token"]], np.int32)

    def submit(self, request, _deliver):
        self.submitted.put((int(request.tokens[0]), request))

    def cancel(self, request):
        self.submitted.put(("cancelled", request))

    def close(self):
        pass


def test_slow_prompt_lets_others_pass_and_can_be_cancelled():
    ours, theirs = Pipe()
    worker = Worker()
    host = threading.Thread(target=_Host(theirs, worker).run)
    host.start()
    for number, content in enumerate(["slow", "quick", "slow"]):
        ours.send((number, Question(({"role": "user", "content": content},), variables={"token": number})))
    assert worker.submitted.get(timeout=60)[0] == 1
    ours.send((0, None))
    ours.send((1, None))
    assert worker.submitted.get(timeout=60)[0] == "cancelled"  # the one that was submitted
    worker.may.set()
    assert ours.poll(60)
    assert ours.recv() == (0, Finished("cancelled", 1, 0, 0))
    assert worker.submitted.get(timeout=60)[0] == 2
    ours.close()
    host.join(60)
    assert not host.is_alive()

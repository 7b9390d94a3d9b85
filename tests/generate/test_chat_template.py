# SPDX-License-Identifier: Apache-2.0
"""Chat templates rendered here and by transformers: their features, files and limits."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from flownpu.errors import FlowNPUError
from flownpu.generate import template_process
from flownpu.generate.chat_template import ChatTemplate
from flownpu.model.folder import CLASS_TOKENS, special_tokens
from tests.generate.template_table import ASK, TOKENS, TOOLS, by_transformers, called, compare, result, said

FIXTURE = Path(__file__).parents[1] / "fixtures" / "gemma3-topics"
EVERY = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
# Each uses one thing that public templates use.
WRITTEN_BY_US = {
    "blocks": "{% for m in messages %}\n    {% if m.role %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\n  x",
    "dashes": "{%- for m in messages -%}  {{- m.content -}}  {%- endfor -%} \n",
    "comments": "a\n  {# one #}\nb {#- two -#} c\n",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token + pad_token }}{{ mask_token }}",
    "tojson": "{{ tools | tojson }}{{ messages | tojson(indent=2) }}{{ tools | tojson(ensure_ascii=True) }}",
    "tojson arguments": "{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}",
    "raise": "{% if tools %}{{ raise_exception('No tools: ' + tools[0].function.name) }}{% endif %}"
    "{{ messages[0].content }}",
    "today": "{{ strftime_now('%d %b %Y') }}",
    "generation": "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}\n{% endgeneration %}{{ x }}"
    "{% endfor %}",
    "namespace": "{% set n = namespace(i=0, t='') %}{% for m in messages %}{% set n.i = n.i + 1 %}"
    "{% set n.t = n.t ~ m.role %}{% endfor %}{{ n.i }}{{ n.t }}",
    "dict": "{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys(['x'], 0) }}",
    "methods": "{{ messages[0].content.strip().replace('i', 'o').split(' ')[-1].upper().startswith('I') }}",
    "filters": "{{ messages | map(attribute='role') | list | unique | join(',') }}{{ messages | first }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages[-1].content | trim | title }}",
    "items": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}"
    "{% for k, v in messages[0] | items %}{{ k }}{% endfor %}",
    "macro": "{% macro turn(m, end='!') %}<{{ m.role }}>{{ m.content }}{{ end }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "slices": "{% for m in messages[1:] %}{{ m.content }}{% endfor %}{{ messages[::-1][0].role }}",
    "tests": "{{ tools is defined }}{{ tools is none }}{{ messages is iterable }}{{ messages[0].content is string }}"
    "{{ messages[0] is mapping }}{{ documents is none }}{{ x is undefined }}{{ x or 'y' }}",
    "markup": "{{ messages[0].content }}<b>&amp;{{ messages[0].content | e }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ 'content' in m }}{% endfor %}",
    "switch": "{% set t = enable_thinking if enable_thinking is defined else 'none' %}{{ t }}{{ reasoning_effort }}",
    "prompt": "{{ messages[0].content }}{% if add_generation_prompt %}<assistant>{% endif %}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "[{{ p.type }}]{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
    "parts alone": "{% for m in messages %}{% for p in m.content %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% else %}<image>{% endif %}{% endfor %}{% endfor %}",
    "call objects": "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }}{% for k, v in "
    "c.function.arguments.items() %}{{ k }}{{ v | tojson }}{% endfor %}{% endfor %}{{ m.content }}{{ m.tool_call_id }}"
    "{{ m.name }}{% endfor %}",
    "call texts": "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.arguments + '!' }}"
    "{% else %}{{ m.role + m.content }}{% endif %}{% endfor %}",
    "alternation": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}{{ m.content }}{% endfor %}",
}


def template(text, **others):
    return ChatTemplate(Path("folder"), {"default": text, **others}, TOKENS)


@pytest.mark.parametrize("name", WRITTEN_BY_US)
def test_templates_equal_transformers(name):
    found = compare(WRITTEN_BY_US[name])
    assert "differs" not in found.values(), found
    assert "equal" in found.values()


@pytest.mark.skipif("FLOWNPU_CHAT_TEMPLATES" not in os.environ, reason="FLOWNPU_CHAT_TEMPLATES names no folder")
def test_public_templates_equal_transformers():
    files = sorted(Path(os.environ["FLOWNPU_CHAT_TEMPLATES"]).glob("*.jinja"))
    assert files
    found = {path.name: compare(path.read_text(encoding="utf-8")) for path in files}
    assert {name: row for name, row in found.items() if "differs" in row.values()} == {}


def test_tool_call_without_content_is_rendered():
    """In cases that transformers refuse: DeepSeek's templates compare content with none, others join it to a text."""
    messages = [ASK, called(None, weather={"city": "Köln"}), result("weather", "3 °C")]
    own = template(WRITTEN_BY_US["call texts"])
    assert own.render(messages, TOOLS) == 'user  How is it?\n{"city": "Köln"}!tool3 °C'
    with pytest.raises(Exception, match="content"):
        by_transformers(WRITTEN_BY_US["call texts"]).apply_chat_template(messages, TOOLS, tokenize=False)
    joined = "{% for m in messages %}{{ m.content + ';' }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    assert '"arguments": {"city": "Köln"}' in template(joined).render(messages, TOOLS)


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (
            EVERY,
            [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}],
            "a<start_of_image>b",
        ),
        ("{{ messages | tojson }}", [{"type": "text", "text": "a"}], '"content": "a"'),
        (WRITTEN_BY_US["parts alone"], "a", "a"),
        (WRITTEN_BY_US["parts"], [{"type": "text", "text": "a"}, {"type": "image"}], "[text]a[image]"),
    ],
)
def test_content_of_other_kind_is_converted(text, content, expected):
    assert expected in template(text).render([said("user", content)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (WRITTEN_BY_US["raise"], "No tools: weather"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "underscore"),
        ("{{ tools | from_json }}", "from_json"),
        ("{{ messages[0].content", "line 1"),
        ("{% if true %}x", "endif"),
        ("{{ messages.nothing.more }}", "nothing"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_template_error_is_quoted(text, said):
    with pytest.raises(FlowNPUError, match=f"chat template does not take this conversation: .*{said}"):
        template(text).render([ASK], TOOLS)


@pytest.fixture
def hurried(monkeypatch):
    """A second for a conversation, once the process has started."""
    template(EVERY).render([ASK])
    monkeypatch.setattr(template_process, "RENDERING_SECONDS", 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s"),
        ("{{ 9 ** (9 ** 9) }}", "more than 1 s"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "more than 33554432 characters"),
        ("{{ 'x' * 10 ** 10 }}", "more than 1024 MiB"),
        ("{{ '%999999999999d' % 1 }}", "more than 1024 MiB|too"),
        (
            "{% set n = namespace(t='x') %}{% for i in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
            "1024 MiB|more than 1 s",
        ),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deeply"),
    ],
)
@pytest.mark.usefixtures("hurried")
def test_endless_template_is_stopped(text, said):
    with pytest.raises(FlowNPUError, match=said):
        template(text).render([ASK])
    assert template(EVERY).render([ASK]) == f"user:{ASK['content']}|"


def test_killed_renderer_is_started_again():
    own = template_process.TemplateProcess()
    request = {"work": "render", "template": EVERY, "messages": [ASK], "tools": [], "values": {}}
    expected = own.ask(**request)
    assert own._process is not None
    own._process.kill()
    own._process.wait()
    assert own.ask(**request) == expected
    own.close()


def test_forked_child_has_own_renderer():
    own = template("{{ messages[0].content }}")
    assert own.render([said("user", "parent")]) == "parent"
    if (child := os.fork()) == 0:
        os._exit(own.render([said("user", "child")]) != "child")
    assert os.waitpid(child, 0)[1] == 0
    assert own.render([said("user", "again")]) == "again"


def test_variables_are_names_that_template_reads():
    text = "{% set a = b %}{% for m in messages %}{{ m.c }}{{ raise_exception(d) }}{% endfor %}{{ range(2) }}{{ a }}"
    assert template(text).variables(tools=False) == {"b", "messages", "d"}
    assert template("", tool_use="{% set x = x if x is defined else 1 %}").variables(tools=True) == {"x"}


@pytest.mark.usefixtures("hurried")
def test_unreadable_template_is_refused():
    with pytest.raises(FlowNPUError, match=r"chat template of folder cannot be read: it took more than 1 s"):
        template("{{ 9 ** (9 ** 9) }}").variables(tools=False)
    with pytest.raises(FlowNPUError, match=r"chat template of folder cannot be read: .*endif.* \(line 1 of"):
        template("{% if true %}").variables(tools=False)


@pytest.fixture
def folder(tmp_path):
    """A tokenizer's folder, without a template."""
    (tmp_path / "tokenizer.json").write_bytes((FIXTURE / "tokenizer.json").read_bytes())
    settings = json.loads((FIXTURE / "tokenizer_config.json").read_text())
    del settings["chat_template"]

    def configure(**changes):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, **changes}))
        return tmp_path

    configure()
    return tmp_path, configure


NAMED = [{"name": "default", "template": "usual " + EVERY}, {"name": "tool_use", "template": "tools " + EVERY}]
OBJECT = {"__type": "AddedToken", "content": "<bos>", "lstrip": False, "normalized": False, "rstrip": False}


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({"chat_template": EVERY}, {}),
        ({"chat_template": EVERY}, {"chat_template.jinja": b"file " + EVERY.encode()}),
        ({"chat_template": NAMED}, {}),
        ({"chat_template": NAMED}, {"chat_template.jinja": EVERY.encode()}),
        (
            {},
            {
                "chat_template.jinja": EVERY.encode(),
                "additional_chat_templates/tool_use.jinja": b"more " + EVERY.encode(),
            },
        ),
        ({}, {"chat_template.jinja": b"\xef\xbb\xbf" + EVERY.encode()}),
        ({}, {"chat_template.jinja": b"a\r\n{% if true %}\r\nb{% endif %}\r\n" + EVERY.encode()}),
        ({"chat_template": "{{ bos_token }}{{ eos_token }}|", "bos_token": OBJECT}, {}),
        (
            {
                "chat_template": "{{ x_token }}{{ image }}|{{ y }}",
                "x_token": "X",
                "extra_special_tokens": {"image": "I"},
            },
            {},
        ),
        ({"chat_template": "{{ bos_token }}{{ sep_token }}|"}, {"special_tokens_map.json": b'{"sep_token": "S"}'}),
        (
            {"chat_template": "{{ bos_token }}{{ sep_token }}|", "added_tokens_decoder": {}},
            {"special_tokens_map.json": b'{"sep_token": {"content": "S", "special": true}}'},
        ),
    ],
)
def test_template_files_are_read_as_in_transformers(folder, settings, files):
    path, configure = folder
    configure(**settings)
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    tokenizer, own = AutoTokenizer.from_pretrained(path), ChatTemplate.of(path)
    for tools in ([], TOOLS):
        expected = tokenizer.apply_chat_template([ASK], tools or None, add_generation_prompt=True, tokenize=False)
        assert own.render([ASK], tools) == expected


@pytest.mark.parametrize("given", [{}, {"bos_token": None}, {"eos_token": "<end>"}])
@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", *CLASS_TOKENS])
def test_special_tokens_equal_transformers(tmp_path, kind, given):
    tokens = {text: at for at, text in enumerate(["<unk>", "<s>", "</s>", "a"])}
    Tokenizer(models.BPE(tokens, [], unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))  # noqa: S106
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **given}))
    expected = AutoTokenizer.from_pretrained(tmp_path).special_tokens_map
    names = ("bos_token", "eos_token")
    assert {name: special_tokens(tmp_path).get(name) for name in names} == {name: expected.get(name) for name in names}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("chat_template.jinja", "{# é #}".encode("latin-1"), "not in UTF-8"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "expected chat_template to be a text, or a list"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', "expected chat_template to be a text"),
        ("tokenizer_config.json", b'{"chat_template": "\xe9"}', "not valid JSON"),
        ("additional_chat_templates/rag.jinja", b"x", "chat templates for rag and none for ordinary"),
    ],
)
def test_damaged_template_file_is_refused(tmp_path, name, content, said):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FlowNPUError, match=said):
        ChatTemplate.of(tmp_path).render([ASK])


@pytest.mark.parametrize("settings", [{}, {"chat_template": None}, {"chat_template": ""}, {"chat_template": []}])
def test_empty_template_is_none(folder, settings):
    path, configure = folder
    configure(**settings)
    assert not ChatTemplate.of(path)
    (path / "chat_template.jinja").write_bytes(b"")
    assert not ChatTemplate.of(path)
    with pytest.raises(FlowNPUError, match="has no chat template, or an empty one"):
        ChatTemplate.of(path).render([ASK])

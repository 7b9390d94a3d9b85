# SPDX-License-Identifier: Apache-2.0
"""Schemas that guidance enforces, judged by the `jsonschema` package, and the bounds of one grammar."""

import asyncio
import json

import jsonschema
import numpy as np
import onnx.parser
import psutil
import pytest

from flownpu.errors import FlowNPUError
from flownpu.generate.speculative import choice
from flownpu.serve.errors import ApiError
from flownpu.serve.grammars import process
from flownpu.serve.grammars.compiler import CONTEXT, END_TOKEN, VOCABULARY, Compiler
from flownpu.serve.grammars.form import AnswerForm, Parameters
from flownpu.serve.grammars.process import GrammarProcess
from flownpu.serve.tools import CallFormat


def of(value, **others):
    """A schema of objects with the one property "a"."""
    return {"type": "object", "properties": {"a": value}, "required": ["a"], "additionalProperties": False, **others}


def text(**keywords):
    return of({"type": "string", **keywords})


def array(**keywords):
    return of({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, **keywords})


NODE = of({"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]})
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
# Schemas that are enforced whole.
ENFORCED = {
    "enum": of({"enum": [1, "x", None, True, "Köln – Süd 😀", "東京"]}),
    "type list": of({"type": ["string", "null"], "maxLength": 5}),
    "nullable": of({"type": "string", "nullable": True, "maxLength": 5}),
    "discriminator": of({"oneOf": [of({"const": "x"}), of({"const": "y"})], "discriminator": {"propertyName": "a"}}),
    "all of": of({"allOf": [{"type": "string"}, {"maxLength": 4}]}),
    "tuple": array(prefixItems=[{"type": "null"}], minItems=2, maxItems=2),
    "draft 7's tuple": of({"type": "array", "items": [{"type": "null"}], "minItems": 1, "additionalItems": False}),
    "pattern of names": {"type": "object", "patternProperties": {"^x": DIGIT}, "additionalProperties": False},
    "number of properties": {"type": "object", "additionalProperties": DIGIT, "minProperties": 2, "maxProperties": 3},
    "date-time": text(format="date-time"),
    "pattern": text(pattern="^[a-z]{2,4}$"),
    "pattern of \\p": text(pattern=r"^\p{Lu}\d$"),
    "slash in a pattern": text(pattern=r"^a/b\/c$"),
    "bounds of 64 bits": of({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
    "draft 4's exclusive bound": of({"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5}),
    "multiple": of({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700}),
    "unknown dialect": {"$schema": "https://example.com/own", **of(DIGIT)},
    "annotations": of(DIGIT | {"title": "T", "examples": [1], "x-order": 1, "deprecated": True}, **{"$id": "urn:x"}),
    "own options of llguidance": of(DIGIT) | {"x-guidance": {"whitespace_pattern": "[ ]{1,9}"}},
    "unevaluated properties": {"properties": {"a": DIGIT}, "type": "object", "unevaluatedProperties": False},
    "unicode names": {"type": "object", "properties": {"größe😀": DIGIT}, "required": ["größe😀"]}
    | {"maxProperties": 1},
    "reference": of({"$ref": "#/$defs/A"}, **{"$defs": {"A": DIGIT}}),
    "definitions": of({"$ref": "#/definitions/A"}, definitions={"A": DIGIT}),
    "reference to a property": of({"$ref": "#/properties/b/items"}, **{"$defs": {}})
    | {"properties": {"a": {"$ref": "#/properties/b/items"}, "b": {"type": "array", "items": DIGIT, "maxItems": 2}}},
    "anchor": of({"$ref": "#here"}, **{"$defs": {"A": DIGIT | {"$anchor": "here"}}}),
    "absolute reference": of(
        {"$ref": "https://a.example/b#/$defs/A"}, **{"$id": "https://a.example/b", "$defs": {"A": DIGIT}}
    ),
    "embedded schema": of(
        {"$ref": "inner"},
        **{
            "$id": "https://a.example/b",
            "$defs": {"A": {"$id": "inner", "$ref": "#/$defs/B", "$defs": {"B": DIGIT}}, "B": {"type": "null"}},
        },
    ),
    "escapes": of({"$ref": "#/$defs/A~1B~0C%25"}, **{"$defs": {"A/B~C%": DIGIT}}),
    "escaped brackets": of({"$ref": "#/$defs/Box%5Bint%5D"}, **{"$defs": {"Box[int]": DIGIT}}),
    "brackets": of({"$ref": "#/$defs/Box[int]"}, **{"$defs": {"Box[int]": DIGIT}}),
    "OpenAPI's components": of({"$ref": "#/components/schemas/A"}, components={"schemas": {"A": DIGIT}}),
    "recursion": {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}},
    "recursion to the root": of({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "reference with siblings": of({"$ref": "#/$defs/A", "maximum": 3, "description": "d"}, **{"$defs": {"A": DIGIT}}),
}
# Schemas with keywords that are left out, and these keywords.
LEFT_OUT = {
    "not": (text(maxLength=3, **{"not": {"const": "x"}}), ["#/properties/a/not"]),
    "if": (of(DIGIT, **{"if": {"required": ["a"]}, "then": {"required": ["b"]}}), ["#/if"]),
    "unique items": (array(uniqueItems=True, maxItems=4), ["#/properties/a/uniqueItems"]),
    "contains": (array(contains={"const": 3}, maxItems=3), ["#/properties/a/contains"]),
    "names": ({"type": "object", "propertyNames": {"maxLength": 3}, "maxProperties": 1}, ["#/propertyNames"]),
    "dependent": (of(DIGIT, dependentRequired={"a": ["b"]}), ["#/dependentRequired"]),
    "overlapping": (of({"oneOf": [DIGIT, {"type": "integer", "minimum": 5, "maximum": 7}]}), ["#/properties/a/oneOf"]),
    "unknown format": (text(format="uri"), ["#/properties/a/format"]),
    "numeric format": (of(DIGIT | {"format": "int64"}), ["#/properties/a/format"]),
    "lookahead": (text(pattern=r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"), ["#/properties/a/pattern"]),
    "back reference": (text(pattern=r"^(a)\1$"), ["#/properties/a/pattern"]),
    "word boundary": (text(pattern=r"\bfoo\b", maxLength=3), ["#/properties/a/pattern"]),
    "names that overlap": (
        {"type": "object", "patternProperties": {"^a": DIGIT, "a$": DIGIT}, "additionalProperties": False},
        ["#/additionalProperties", "#/patternProperties"],
    ),
    "behind a reference": (
        of({"$ref": "#/$defs/A"}, **{"$defs": {"A": {"type": "array", "items": DIGIT, "uniqueItems": True}}}),
        ["#/$defs/A/uniqueItems"],
    ),
    "large multiple": (of({"type": "integer", "multipleOf": 3999971}), ["#/properties/a/multipleOf"]),
    "many items": (array(maxItems=10**9), ["#/properties/a/maxItems"]),
    "long text": (text(maxLength=10**18), ["#/properties/a/maxLength"]),
}
# Schemas that no value follows, invalid ones and too large ones, with the expected messages.
REFUSED = {
    "no alternative": (of({"enum": []}), "unsatisfiable"),
    "minimum above maximum": (of(DIGIT | {"minimum": 10}), "unsatisfiable"),
    "forbidden and required": (of(False), "unsatisfiable"),
    "a reference to itself": ({"$ref": "#"}, "no text follows"),
    "missing definition": (of({"$ref": "#/$defs/A"}), "'#/$defs/a' at #/properties/a/$ref leads to nothing"),
    "a reference elsewhere": (of({"$ref": "https://a.example/b"}), "nothing outside it is fetched"),
    "unknown type": ({"type": "thing"}, "thing"),
    "not a schema": ({"properties": {"a/b": 5}}, "at #/properties/a~1b of the schema, got 5"),
    "id that is none": (of(DIGIT, **{"$id": 5}), "expected a text as the schema's id"),
    "not an object": ({"properties": [1]}, "expected an object of schemas at #/properties of the schema"),
    "not a list": ({"anyOf": {}}, "expected a list of schemas at #/anyOf"),
    "many items": (
        array(minItems=10**9),
        "minItems at #/properties/a is 1000000000, and this server takes up to 10000",
    ),
    "many alternatives": ({"type": "object", "properties": {f"p{i}": True for i in range(1000)}}, "current row has"),
}


@pytest.fixture(scope="module")
def compiler():
    return Compiler()


def written(compiler, guidance, seed):
    """A random text that follows a grammar; ends of texts, lists and numbers are likelier than anything else."""
    random = np.random.default_rng(seed)

    def generator(model):
        parameters = compiler._genai.GeneratorParams(model)
        parameters.set_search_options(do_sample=False)
        parameters.set_guidance(*guidance.genai_grammar)
        return compiler._genai.Generator(model, parameters)

    writer = compiler._choices.choice(generator)
    writer.append(np.array([END_TOKEN], np.int32), np.zeros(VOCABULARY, np.float32))
    tokens = []
    while not writer.generator.is_done():
        logits = random.random(VOCABULARY, np.float32)
        logits[[*b'"]},', END_TOKEN]] += random.random(5, np.float32)
        tokens.append(writer.next(logits))
        assert len(tokens) < CONTEXT
    return bytes(token for token in tokens if token != END_TOKEN).decode()


def violated(schema, value):
    """The places in a schema that a value violates."""
    errors = jsonschema.Draft202012Validator(schema).iter_errors(value)
    return [{str(step) for step in error.absolute_schema_path} for error in errors]


# Keywords that `jsonschema` reads differently from drafts before 2020-12 or the OpenAPI specification.
NOT_JUDGED = {"draft 7's tuple", "draft 4's exclusive bound", "pattern of \\p"}


@pytest.mark.parametrize("name", ENFORCED)
def test_enforced_schema_is_followed(compiler, name):
    schema = ENFORCED[name]
    grammar = compiler.compile(AnswerForm(schema))
    assert grammar.left_out == ()
    for seed in range(5):
        value = json.loads(written(compiler, grammar.guidance, seed))
        assert name in NOT_JUDGED or violated(schema, value) == [], value


@pytest.mark.parametrize("name", LEFT_OUT)
def test_partly_enforced_schema_names_left_keywords(compiler, name):
    schema, places = LEFT_OUT[name]
    grammar = compiler.compile(AnswerForm(schema))
    assert sorted(grammar.left_out) == places
    keywords = {place.rpartition("/")[2] for place in places}
    keywords |= {"then"} if "if" in keywords else set()  # the package's paths have "then" only
    for seed in range(5):
        value = json.loads(written(compiler, grammar.guidance, seed))
        assert all(steps & keywords for steps in violated(schema, value)), value


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_schema_is_refused(compiler, name):
    schema, message = REFUSED[name]
    with pytest.raises(FlowNPUError, match=r"^the schema of the answer: ") as refused:
        compiler.compile(AnswerForm(schema))
    assert message.lower() in str(refused.value).lower()


def test_tools_and_their_left_out_keywords_are_named(compiler):
    functions = (Parameters("one", LEFT_OUT["unique items"][0]), Parameters("two", ENFORCED["recursion to the root"]))
    form = AnswerForm(None, functions, CallFormat(template_knows_tools=True), must_call=True)
    grammar = compiler.compile(form)
    assert grammar.left_out == ("one#/properties/a/uniqueItems",)
    names = set()
    for seed in range(12):
        call = json.loads(written(compiler, grammar.guidance, seed))
        names.add(call["name"])
        schema = next(one.schema for one in functions if one.name == call["name"])
        assert all("uniqueItems" in steps for steps in violated(schema, call["arguments"]))
    assert names == {"one", "two"}
    bad = (*functions, Parameters("three", {"type": "thing"}))
    with pytest.raises(FlowNPUError, match=r"^the parameters of the tool three: "):
        compiler.compile(AnswerForm(None, bad, CallFormat(template_knows_tools=True)))


def test_graph_of_choice_equals_its_text():
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        choice (int64[B, S] input_ids, float[B, 1, V] row) => (float[B, 1, V] logits) { logits = Identity(row) }"""
    )
    assert model.SerializeToString() == choice._GRAPH


@pytest.fixture
def grammars():
    """Calls a `GrammarProcess`; the process is ended with the test."""
    made = GrammarProcess()
    with asyncio.Runner() as runner:
        yield lambda schema: runner.run(made.compile(AnswerForm(schema)))
        runner.run(made.close())


def many(count):
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}}


def test_slow_grammar_is_given_up(grammars, monkeypatch):
    monkeypatch.setattr(process, "SECONDS", 0.2)
    with pytest.raises(ApiError, match=r"takes more than 0\.2 s to compile") as refused:
        grammars(many(6000))
    monkeypatch.undo()
    assert (refused.value.status, refused.value.parameter) == (400, "response_format")
    assert grammars(ENFORCED["recursion"]).guidance is not None


def test_large_grammar_is_given_up(grammars, monkeypatch):
    assert grammars(array(maxItems=10)).guidance is not None
    monkeypatch.setattr(process, "MEMORY", 2**20)
    with pytest.raises(ApiError, match="takes more than 1 MiB"):
        grammars({"enum": [{"v": number, "w": [number]} for number in range(2000)]})
    monkeypatch.undo()
    assert grammars(array(maxItems=11)).guidance is not None


def test_crashing_grammar_is_refused(grammars):
    with pytest.raises(ApiError, match="GenAI's guidance crashes") as refused:
        grammars({"const": -(2**63)})
    assert refused.value.status == 400
    assert grammars({"const": 1}).guidance is not None


def test_schema_beyond_all_bounds_is_refused_before_it_is_compiled(grammars):
    deep = {"type": "integer"}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    for schema, message in [(deep, "nested too deeply"), ({"const": "x" * 2**20}, "more than 1048576 characters")]:
        with pytest.raises(ApiError, match=message):
            grammars(schema)
    shallow = {"type": "integer"}
    for _ in range(101):
        shallow = {"type": "array", "items": shallow}
    with pytest.raises(ApiError, match="at most 100 levels"):
        grammars(shallow)


def test_compiling_process_restarts_after_crash(grammars):
    assert grammars({"const": 1}).guidance is not None
    (child,) = [one for one in psutil.Process().children() if "flownpu.serve.grammars.host" in one.cmdline()]
    child.kill()
    child.wait(10)
    assert grammars({"const": 2}).guidance is not None
    assert grammars({"const": 1}).guidance is not None


def test_request_waiting_for_other_grammar_can_be_cancelled():
    """The process serves the next request normally."""

    async def cancelled():
        made = GrammarProcess()
        running = asyncio.create_task(made.compile(AnswerForm(many(300))))
        waiting = asyncio.create_task(made.compile(AnswerForm(many(301))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        running.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert (await made.compile(AnswerForm({"const": 1}))).guidance is not None
        await made.close()
        return running.cancelled() and waiting.cancelled()

    assert asyncio.run(cancelled())

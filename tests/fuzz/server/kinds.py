# SPDX-License-Identifier: Apache-2.0
"""Kinds of requests, by name: each makes one from a source of random numbers."""

import gzip
import json
from collections.abc import Callable, Collection
from random import Random
from typing import Any

from tests.fuzz.server import bodies, schemas, values
from tests.fuzz.server.exchange import Request

_JSON = (("Content-Type", "application/json"),)
_GETS = (
    "/health", "/metrics", "/v1/models", "/v1/models/topics", "/api/tags", "/api/ps", "/api/version", "/",
    "/page/chat.js",
)  # fmt: skip
_PATHS = (
    *_GETS, "/v1/models/none", "/v1", "/v1/chat/completions/", "/v2/chat/completions", "/api/pull", "/api/embeddings",
    "/page/../../etc/passwd", "/page/%2e%2e/%2e%2e/etc/passwd", "/v1/models/%00", "/v1/models/" + "a" * 5000, "//",
    "/%ff%fe", "*", "http://127.0.0.1/v1/models", "/v1/models?x=" + "y" * 3000, "/openapi.json", "/docs",
    *bodies.ROUTES,
)  # fmt: skip
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW")
# Milliseconds and more in which a slow client sends a quarter of its body; the last one is beyond the server's limit.
_PAUSES = (0.01, 0.1, 0.5, 4.0)


def _posted(kind: str, path: str, body: bytes, **how: Any) -> Request:
    return Request(kind, "POST", path, _JSON, body, **how)


def _of(kind: str, random: Random, document: Callable[[Random, str], dict[str, Any]], **how: Any) -> Request:
    """A request to any route that takes prompts."""
    path = random.choice(bodies.ROUTES)
    return _posted(kind, path, values.body(document(random, path)), **how)


def plain(random: Random) -> Request:
    """A request of a well-behaved client."""
    return _of("plain", random, bodies.plain, succeeds=True)


def texts(random: Random) -> Request:
    """Texts of special characters, in every place where a text can be."""
    return _of("texts", random, lambda random, path: bodies.plain(random, path, values.text(random)))


def schema(random: Random) -> Request:
    """A schema whose every keyword must hold."""
    wanted = schemas.usual(random)
    path = random.choice(bodies.WITH_SCHEMA)
    body = values.body(bodies.with_schema(random, path, wanted))
    return _posted("schema", path, body, succeeds=True, schema=wanted)


def odd_schema(random: Random) -> Request:
    """A schema that may be none."""
    path = random.choice(bodies.WITH_SCHEMA)
    return _posted("odd schema", path, values.body(bodies.with_schema(random, path, schemas.odd(random))))


def bomb(random: Random) -> Request:
    """A schema that asks for much memory or time, also as a tool's."""
    make = random.choice((bodies.with_schema, bodies.with_tools))
    path = random.choice(bodies.WITH_SCHEMA if make is bodies.with_schema else bodies.WITH_TOOLS)
    return _posted("bomb", path, values.body(make(random, path, schemas.bomb(random))))


def tools(random: Random) -> Request:
    """Tools with nested arguments, and the results of earlier calls."""
    path = random.choice(bodies.WITH_TOOLS)
    return _posted("tools", path, values.body(bodies.with_tools(random, path, schemas.usual(random))), succeeds=True)


def odd_tools(random: Random) -> Request:
    """Invalid tools, choices of missing tools, and results of calls that nobody made."""
    path = random.choice(bodies.WITH_TOOLS)
    document = bodies.with_tools(random, path, schemas.odd(random))
    return _posted("odd tools", path, values.body(values.damaged(random, document)))


def wrong(random: Random) -> Request:
    """A body with other values, other types, other fields."""

    def document(random: Random, path: str) -> dict[str, Any]:
        return values.damaged(random, bodies.plain(random, path))

    return _of("wrong", random, document)


def numbers(random: Random) -> Request:
    """Numbers beyond what their fields take."""
    path = random.choice(bodies.ROUTES)
    document = bodies.plain(random, path)
    fields = (
        "max_tokens", "temperature", "top_p", "top_k", "seed", "n", "frequency_penalty", "presence_penalty", "logprobs",
        "top_logprobs", "best_of", "num_predict", "repeat_penalty", "min_p", "num_ctx",
    )  # fmt: skip
    options = document.setdefault("options", {}) if path.startswith("/api/") else document
    options.update({name: values.number(random) for name in random.sample(fields, random.randint(1, 3))})
    return _posted("numbers", path, values.body(document))


def tokens(random: Random) -> Request:
    """A prompt in tokens, of any numbers, or several."""
    one = [random.choice((0, 1, 2, 7, 100, -1, 10**6, 10**12)) for _ in range(random.randint(0, 30))]
    prompt: Any = random.choice((one, [one, one], [[]], [], [one, "text"], [True], [1.5], one * 300))
    document = {"model": random.choice(bodies.MODELS), "prompt": prompt, "max_tokens": 4}
    return _posted("tokens", "/v1/completions", values.body(document))


def embeddings(random: Random) -> Request:
    """Texts to embed, in numbers and lengths of any size, for a model that embeds and for others."""
    several = [values.text(random) for _ in range(random.choice((0, 1, 5, 100, 3000)))]
    texts: Any = random.choice((values.text(random), several, "word " * 5000, [1, 2], [[1]], values.value(random)))
    document = {"model": random.choice((*[bodies.EMBEDDING] * 5, *bodies.MODELS)), "input": texts}
    fields: tuple[dict[str, Any], ...] = (
        {},
        {"dimensions": values.number(random)},
        {"encoding_format": "base64"},
        {"truncate": False},
    )
    return _posted("embeddings", random.choice(bodies.EMBEDDINGS), values.body(document | random.choice(fields)))


def lists(random: Random) -> Request:
    """Stop texts, biases and log-probabilities."""
    stop = [values.text(random, 40) for _ in range(random.choice((0, 1, 4, 16, 200)))]
    fields: tuple[dict[str, Any], ...] = (
        {"stop": stop},
        {"stop": random.choice(("", "\0", " ", None, [""]))},
        {"logprobs": True, "top_logprobs": random.choice((0, 1, 20, 21, 10**9, -1))},
        {"logit_bias": {values.text(random, 8): values.number(random), "5": 100}},
        {"stop": stop, "stream": True, "logprobs": True},
    )
    document = bodies.plain(random, "/v1/chat/completions") | random.choice(fields)
    return _posted("lists", "/v1/chat/completions", values.body(document))


def images(random: Random) -> Request:
    """Pictures that are damaged, immense, many, or none, for the model that takes them and for one that does not."""
    return _posted("images", "/v1/chat/completions", values.body(bodies.with_images(random)))


def deep(random: Random) -> Request:
    """JSON that is deep, alone and in a field."""
    nested = values.nested(random)
    if random.random() < 0.7:
        field = random.choice((b"messages", b"response_format", b"tools", b"metadata", b"stop"))
        nested = b'{"model": "topics", "%b": %b}' % (field, nested)
    return _posted("deep", random.choice(bodies.ROUTES), nested)


def no_json(random: Random) -> Request:
    """A body that is no JSON, has another encoding than UTF-8, or is compressed."""
    path = random.choice(bodies.ROUTES)
    right = json.dumps(bodies.plain(random, path), ensure_ascii=False)
    encoding = random.choice(("utf-16", "utf-32-le", "utf-8-sig", "latin-1"))
    body = random.choice(
        (
            random.randbytes(random.randint(0, 300)),
            right.encode(encoding, "replace"),
            right.encode()[: random.randint(0, len(right))],
            right.encode() + b"}",
            right.replace('"', "'").encode(),
            right[:-1].encode() + b', "model": "topics", "model": "none"}',
            gzip.compress(right.encode()),
            b'"text"', b"null", b"0", b"[]", b"NaN", b"",
            b'{"model": "topics", "messages": "\xff\xfe"}',
        )
    )  # fmt: skip
    return _posted("no JSON", path, body)


def headers(random: Random) -> Request:
    """Headers that are wrong, large, many, or of another host or origin."""
    odd = (
        ("Content-Type", random.choice(("text/plain", "application/x-www-form-urlencoded", "", "a" * 5000, "\xff"))),
        ("Host", random.choice(("attacker.example", "", "127.0.0.1:1", "[::1]", "a" * 3000))),
        ("Origin", random.choice(("https://attacker.example", "null", "\xff"))),
        ("Authorization", random.choice(("Bearer x", "Bearer \xe9", "Basic !!!", ""))),
        ("Content-Encoding", "gzip"), ("Expect", "100-continue"), ("Transfer-Encoding", "gzip, chunked"),
        ("Content-Length", random.choice(("-1", "1e3", "99999999999999999999", "0x10", "5, 6"))),
        ("Connection", random.choice(("Upgrade, close", "keep-alive, close"))), ("Upgrade", "h2c"),
        ("Accept", "a/b" * 500), ("X-" + "a" * 50, "b" * random.choice((10, 5000, 100_000))), ("Bad Name", "x"),
        ("X-Line", "a\r\nX-Other: b"), ("X-Nul", "a\0b"), ("Range", "bytes=0-1"), ("Cookie", "a=" + "b" * 4000),
        ("Access-Control-Request-Method", "POST"),
    )  # fmt: skip
    path = random.choice(bodies.ROUTES)
    given = [*_JSON, *random.sample(odd, random.randint(1, 4))]
    if random.random() < 0.1:
        given += [(f"X-{i}", "y") for i in range(500)]
    return Request("headers", "POST", path, tuple(given), values.body(bodies.plain(random, path)))


def routes(random: Random) -> Request:
    """Any path with any method."""
    if random.random() < 0.4:
        return Request("routes", "GET", random.choice(_GETS), succeeds=True)
    return Request("routes", random.choice(_METHODS), random.choice(_PATHS))


def uploads(random: Random) -> Request:
    """A body that is cut, slow, too large, or not as long as it says."""
    path = random.choice(bodies.ROUTES)
    body = values.body(bodies.plain(random, path))
    large = b" " * random.choice((2**20 + 1, 5 * 2**20))
    how: dict[str, Any] = random.choice(
        (
            {"manner": "cut", "bytes_": random.randint(0, len(body))},
            {"manner": "cut", "bytes_": random.randint(0, len(body)), "declared": 10**9},
            {"manner": "slow", "pause": random.choice(_PAUSES)},
            {"manner": "slow", "pause": random.choice(_PAUSES), "declared": -1},
            {"declared": random.choice((0, len(body) - 1, len(body) + 1, 10**12))},
            {"declared": -1},
            {"body": large},
            {"body": large, "declared": -1},
        )
    )
    return _posted("uploads", path, **({"body": body} | how))


def leaving(random: Random) -> Request:
    """A client that leaves before the end of a long answer."""
    leave = {"manner": "leave", "bytes_": random.choice((1, 200, 1000, 3000))}
    return _of("leaving", random, lambda random, path: bodies.plain(random, path, tokens=400), **leave)


def much(random: Random) -> Request:
    """Many answers, many prompts, long prompts, many turns."""
    path = random.choice(bodies.ROUTES)
    document = bodies.plain(random, path)
    long = "word " * random.choice((900, 20_000, 150_000))
    fields: list[dict[str, Any]] = [{"n": random.choice((2, 16, 17, 100))}, {"max_tokens": 10**9}]
    if path == "/v1/completions":
        fields += [{"prompt": ["Strings are"] * random.choice((3, 16, 1000))}, {"prompt": long}]
    elif "messages" in document:
        turns = [{"role": role, "content": "x"} for role in ("user", "assistant")] * random.choice((10, 500, 5000))
        fields += [{"messages": [*turns, *document["messages"]]}, {"messages": [{"role": "user", "content": long}]}]
    return _posted("much", path, values.body(document | random.choice(fields)))


# Weights of the kinds, relative to one another.
KINDS: dict[str, tuple[int, Callable[[Random], Request]]] = {
    "plain": (10, plain), "texts": (10, texts), "schema": (10, schema), "odd schema": (10, odd_schema),
    "bomb": (4, bomb), "tools": (6, tools), "odd tools": (6, odd_tools), "wrong": (10, wrong), "numbers": (8, numbers),
    "tokens": (4, tokens), "lists": (6, lists), "images": (6, images), "deep": (4, deep), "no JSON": (6, no_json),
    "headers": (6, headers), "routes": (8, routes), "uploads": (4, uploads), "leaving": (8, leaving), "much": (2, much),
    "embeddings": (6, embeddings),
}  # fmt: skip


def request(seed: int, client: int, number: int, kinds: Collection[str] = KINDS) -> Request:
    """The request with this number of a client: always the same one, whatever came before it."""
    random = Random(f"{seed}/{client}/{number}")
    names = list(kinds)
    (name,) = random.choices(names, [KINDS[name][0] for name in names])
    return KINDS[name][1](random)

# SPDX-License-Identifier: Apache-2.0
"""/v1/images/generations of a server in diffusers' environment, asked by OpenAI's client."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import ollama
import openai
import pytest
from PIL import Image

from tests.fixtures.shapes_drawings import GUIDANCE, read
from tests.imagine import environment
from tests.serve.conftest import Server, serve

ASKED = {"model": "shapes", "prompt": "a blue circle"}


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[Server]:
    started = serve(
        f"shapes={exported}", "--device", "cpu", "--queue", 1, python=environment.python(), **environment.VARIABLES
    )
    yield started
    started.end()


def pictures(answer: openai.types.ImagesResponse) -> list[Image.Image]:
    return [Image.open(io.BytesIO(base64.b64decode(one.b64_json or ""))) for one in answer.data or []]


def test_openai_client_gets_pictures(server: Server) -> None:
    client = server.openai()
    settings = {"guidance": GUIDANCE, "seed": 4}
    made = client.images.generate(**ASKED, n=2, size="32x32", extra_body=settings)
    first, second = pictures(made)
    assert read(first) == read(second) == ("blue", "circle")
    assert (np.asarray(first) != np.asarray(second)).any()
    # The next seed is that of the second picture.
    (again,) = pictures(client.images.generate(**ASKED, response_format="b64_json", extra_body=settings | {"seed": 5}))
    np.testing.assert_array_equal(np.asarray(second), np.asarray(again))
    assert [model.id for model in client.models.list()] == ["shapes"]
    assert ollama.Client(host=server.address).show("shapes").capabilities == ["image"]
    assert [one.model for one in ollama.Client(host=server.address).list().models] == ["shapes"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"size": "33x32"}, "multiples of 8, got 33x32"),
        ({"size": "2048x1024"}, "expected 1048576 pixels at most, got 2048x1024"),
        ({"size": "large"}, "size: expected a size in pixels"),
        ({"n": 11}, "n: Input should be less than or equal to 10"),
        ({"extra_body": {"steps": 151}}, "steps: Input should be less than or equal to 150"),
        ({"extra_body": {"scheduler": "best"}}, "scheduler: Input should be 'ddim'"),
        ({"response_format": "url"}, "response_format"),
        ({"stream": True}, "stream"),
        ({"prompt": "a red star " * 6}, "20 tokens, and the model reads 16 at most"),
        ({"prompt": ""}, "prompt"),
        ({"model": "none"}, "no model 'none' here; there is shapes"),
        ({"extra_body": {"sampler": "x"}}, "unknown field sampler"),
    ],
)
def test_unfit_request_is_refused(fields: dict[str, object], reason: str, server: Server) -> None:
    with pytest.raises(openai.APIStatusError, match=reason):
        server.openai().images.generate(**{**ASKED, **fields})  # type: ignore[call-overload]


def test_pipeline_does_not_chat(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="the model shapes makes pictures: ask /v1/images/generations"):
        server.openai().chat.completions.create(model="shapes", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="Of models that embed texts there is here: none"):
        server.openai().embeddings.create(model="shapes", input="x")
    assert server.http().get("/health").json()["models"] == {"shapes": True}


def test_picture_of_client_that_left_is_given_up(server: Server) -> None:
    """`tests/serve/test_in_process.py` has what the thread does meanwhile."""
    with pytest.raises(httpx.ReadTimeout), server.http() as http:
        http.post("/v1/images/generations", json={**ASKED, "n": 10, "steps": 150}, timeout=2)
    assert server.openai().images.generate(**ASKED, extra_body={"steps": 1}).data
    assert "shapes: a request was given up" in server.text()

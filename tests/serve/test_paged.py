# SPDX-License-Identifier: Apache-2.0
"""A paged model on the server: many clients at once, whose requests share the engine's runs and its cache."""

import asyncio

import openai
import pytest

PROMPTS = [
    'The "for" statement is used to',
    "Strings are",
    "If the class defines",
    "The following exceptions are raised when",
    "The expression list",
    "Class instances",
    "Modules are",
    "In the following",
]
GREEDY = {"temperature": 0, "model": "topics"}


@pytest.fixture(scope="module")
def server(start_server, paged_topics):
    return start_server(paged_topics, "--context", 1024, "--activations", "bf16")


def test_concurrent_answers_equal_single_ones(server):
    client = server.openai()
    alone = [client.completions.create(prompt=text, max_tokens=20, **GREEDY).choices[0].text for text in PROMPTS]
    assert len(set(alone)) == len(PROMPTS)

    async def ask(client, text, tokens):
        stream = await client.completions.create(prompt=text, max_tokens=tokens, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def leave(client):
        """Goes away after the first piece."""
        stream = await client.completions.create(prompt=PROMPTS[0], max_tokens=500, stream=True, **GREEDY)
        async for _ in stream:
            await stream.close()
            return

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
            asked = [ask(client, text, 20) for text in PROMPTS]
            return await asyncio.gather(*asked, leave(client))

    assert asyncio.run(all_of_them())[:-1] == alone


def test_shared_prefix_is_not_computed_again(server):
    client = server.openai()
    prefix = "The expression list is evaluated in this order. " * 12
    answers = [
        client.completions.create(prompt=prefix + rest, max_tokens=4, **GREEDY)
        for rest in ("First things first.", "Class instances")
    ]
    usage = answers[1].usage
    # All whole blocks of 16 tokens that are the same.
    assert usage.prompt_tokens - 32 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert answers[0].usage.prompt_tokens_details.cached_tokens == 0


def test_unsupported_request_is_refused(server):
    client = server.openai()
    with pytest.raises(
        openai.BadRequestError, match="ORT GenAI's engine, which computes it, gives tokens and no logits"
    ):
        client.completions.create(prompt=PROMPTS[0], max_tokens=4, logprobs=2, **GREEDY)
    assert client.completions.create(prompt=PROMPTS[0], max_tokens=4, **GREEDY).choices[0].text


def test_temperature_0_in_float32_takes_likeliest_token(server):
    """GenAI holds it in float32, and refuses top_p beside 0."""
    client = server.openai()
    asked = {"model": "topics", "prompt": PROMPTS[0], "max_tokens": 8, "top_p": 0.5}
    texts = [client.completions.create(temperature=value, **asked).choices[0].text for value in (0, 1e-46, 1e-320)]
    # A top_k of 1 takes it at every temperature.
    texts.append(client.completions.create(temperature=0.7, extra_body={"top_k": 1}, **asked).choices[0].text)
    assert len(set(texts)) == 1

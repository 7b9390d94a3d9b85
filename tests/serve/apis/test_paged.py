# SPDX-License-Identifier: Apache-2.0
"""A paged model on the server: refusals and likeliest tokens; test_engine_worker.py asks for much at once."""

import openai
import pytest

PROMPT = 'The "for" statement is used to'
GREEDY = {"temperature": 0, "model": "paged"}


def test_unsupported_request_is_refused(server_of_three):
    client = server_of_three.openai()
    with pytest.raises(
        openai.BadRequestError, match="ORT GenAI's engine, which computes it, gives tokens and no logits"
    ):
        client.completions.create(prompt=PROMPT, max_tokens=4, logprobs=2, **GREEDY)
    assert client.completions.create(prompt=PROMPT, max_tokens=4, **GREEDY).choices[0].text


def test_temperature_0_in_float32_takes_likeliest_token(server_of_three):
    """GenAI holds it in float32, and refuses top_p beside 0."""
    client = server_of_three.openai()
    asked = {"model": "paged", "prompt": PROMPT, "max_tokens": 8, "top_p": 0.5}
    texts = [client.completions.create(temperature=value, **asked).choices[0].text for value in (0, 1e-46, 1e-320)]
    # A top_k of 1 takes it at every temperature.
    texts.append(client.completions.create(temperature=0.7, extra_body={"top_k": 1}, **asked).choices[0].text)
    assert len(set(texts)) == 1

# SPDX-License-Identifier: Apache-2.0
"""The `openai` client talks to the server: chats and completions, whole and streamed, sync and async."""

import asyncio
import itertools
import math

import openai
import pytest

from flownpu.generate.language_model import LanguageModel, Sampling, Timing

MESSAGES = [{"role": "user", "content": "Tell me about loops."}]
GREEDY = {"temperature": 0, "model": "topics"}
EXACT = {"activations": "bf16"}


@pytest.fixture(scope="module")
def client(server_of_three):
    return server_of_three.openai()


@pytest.fixture(scope="module")
def expected(topics):
    """The text of `flownpu run`: the first 24 tokens, one by one."""
    model = LanguageModel(topics, options=EXACT)
    prompt = model.tokens_of_messages(MESSAGES)
    pieces = model.complete(prompt, 24, Sampling(temperature=0), Timing())
    return list(itertools.islice(pieces, 24)), len(prompt)


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["topics", "paged", "seeing"]
    assert client.models.retrieve("topics").owned_by == "flownpu"


def test_chat_text_equals_flownpu_run(client, expected):
    pieces, prompt_tokens = expected
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=24, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == "".join(pieces)
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, 24)
    assert answer.usage.total_tokens == prompt_tokens + 24


def test_stream_has_same_text_and_usage(client, expected):
    pieces, prompt_tokens = expected
    stream = client.chat.completions.create(
        messages=MESSAGES, max_completion_tokens=24, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-2]] == [piece for piece in pieces if piece]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    again = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=1, **GREEDY)
    # The same prompt again: all but its last token is in the KV cache.
    assert again.usage.prompt_tokens_details.cached_tokens == prompt_tokens - 1


def test_stop_text_ends_answer_before_it(client, expected):
    pieces, _ = expected
    text = "".join(pieces)
    # Longer than a token, and found in the middle of one.
    stop = text[7:14]
    for stops in (stop, ["never", stop]):
        answer = client.chat.completions.create(messages=MESSAGES, max_tokens=24, stop=stops, **GREEDY)
        assert answer.choices[0].message.content == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"


def test_seed_repeats_text_and_choices_differ(client):
    def texts(seed, n=1):
        sampling = {"model": "topics", "temperature": 1.5, "seed": seed, "max_tokens": 12}
        answer = client.chat.completions.create(messages=MESSAGES, n=n, **sampling)
        return [choice.message.content for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first = texts(7, n=3)
    assert len(set(first)) == 3
    assert texts(7, n=2) == first[:2]
    assert texts(9) != first[:1]


def test_logprobs_are_of_tokens_that_were_taken(client, expected):
    pieces, _ = expected
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert "".join(one.token for one in content) == "".join(pieces[:5])
    for one in content:
        logprobs = [other.logprob for other in one.top_logprobs]
        assert one.logprob == logprobs[0] == max(logprobs)  # greedy takes the likeliest
        assert sum(map(math.exp, logprobs)) <= 1


def test_completions_of_several_prompts_equal_single_ones(client, topics):
    model = LanguageModel(topics, options=EXACT)
    prompts = ["Strings are", 'The "for" statement is used to']
    expected = [
        "".join(itertools.islice(model.complete(model.tokens_of_text(prompt), 8, Sampling(temperature=0), Timing()), 8))
        for prompt in prompts
    ]
    for given in (prompts, [model.tokens_of_text(prompt).tolist() for prompt in prompts]):
        answer = client.completions.create(prompt=given, max_tokens=8, **GREEDY)
        assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.completion_tokens == 16
    stream = client.completions.create(prompt=prompts[0], max_tokens=8, stream=True, logprobs=2, **GREEDY)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[0]
    assert len(chunks[0].choices[0].logprobs.top_logprobs[0]) == 2


def test_concurrent_async_answers_equal_single_ones(server_of_three, expected):
    """More requests than slots: each answer is the same as alone."""
    pieces, _ = expected

    async def ask(client, tokens):
        stream = await client.chat.completions.create(messages=MESSAGES, max_tokens=tokens, stream=True, **GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(
            base_url=f"{server_of_three.address}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(ask(client, tokens) for tokens in range(4, 24, 4)))

    texts = asyncio.run(all_of_them())
    assert texts == ["".join(pieces[:tokens]) for tokens in range(4, 24, 4)]


def test_echoed_logprobs_are_those_of_prompts_tokens(client, topics):
    """As evaluation harnesses ask; the reference asks for the next token's behind every beginning of the prompt."""
    tokens = LanguageModel(topics, options=EXACT).tokens_of_text('The "for" statement is').tolist()
    scored = {"max_tokens": 0, "logprobs": 1, "echo": True, **GREEDY}
    answer = client.completions.create(prompt=tokens, **scored).choices[0]
    assert answer.text == 'The "for" statement is'
    assert answer.finish_reason == "length"
    assert (len(answer.logprobs.tokens), answer.logprobs.token_logprobs[0]) == (len(tokens), None)
    for place in range(1, len(tokens)):
        # Top 20 of the next token; the prompt's own is among them, or less likely than all of them.
        asked = client.completions.create(prompt=tokens[:place], max_tokens=1, logprobs=20, **GREEDY)
        likeliest = asked.choices[0].logprobs.top_logprobs[0]
        own, token = answer.logprobs.token_logprobs[place], answer.logprobs.tokens[place]
        # A prompt's products and a token's round the same bf16 values in another order; the logits are some 10 wide.
        assert own == pytest.approx(likeliest.get(token, own), abs=0.1)
        assert token in likeliest or own <= min(likeliest.values()) + 0.1
        assert max(answer.logprobs.top_logprobs[place].values()) == pytest.approx(max(likeliest.values()), abs=0.1)
    longer = client.completions.create(prompt=tokens, **{**scored, "max_tokens": 3}).choices[0]
    assert longer.logprobs.token_logprobs[: len(tokens)] == answer.logprobs.token_logprobs
    assert len(longer.logprobs.tokens) == len(tokens) + 3
    assert longer.text.startswith(answer.text)
    plain = client.completions.create(prompt='The "for" statement is', max_tokens=3, echo=True, **GREEDY).choices[0]
    assert plain.text == longer.text
    counted = client.completions.create(prompt=tokens, max_tokens=0, **GREEDY)
    assert (counted.choices[0].text, counted.usage.prompt_tokens) == ("", len(tokens))
    with pytest.raises(openai.BadRequestError, match="leave logprobs and echo out"):
        client.completions.create(prompt=tokens, **{**scored, "model": "paged"})


def test_as_many_tokens_as_fit_may_be_minus_one(client):
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=-1, stop="\n", **GREEDY)
    assert answer.usage.completion_tokens > 16

# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.engines.servers`: its prompts, and its printed figures."""

import asyncio

from benchmarks.engines.servers import Answers, ask_all, prompts_of


def test_client_prompts_share_first_half() -> None:
    prompts = prompts_of(3, [10, 64], 1000, seed=1)
    longest = max(prompts[0], key=len)
    for own in prompts:
        assert sorted(map(len, own)) == [10, 64]
        assert all(prompt[: len(prompt) // 2] == longest[: len(prompt) // 2] for prompt in own)
        assert all(8 <= token < 1000 for prompt in own for token in prompt)
    assert len({tuple(prompt[len(prompt) // 2 :]) for own in prompts for prompt in own}) == 6
    assert prompts == prompts_of(3, [10, 64], 1000, seed=1)


def test_row_has_medians_of_rounds_and_percentiles_of_answers() -> None:
    answers = Answers(first=[0.1, 0.2, 0.3], between=[0.01] * 4, rates=[8.0, 4.0], failures=["gone"])
    assert answers.row() == ["6.0", "200", "290", "10", "10", "1", "gone"]


def test_ask_all_counts_answers_and_failures(start_server, topics) -> None:
    url = f"{start_server(topics, '--context', 60).address}/v1"
    answers = Answers()
    asyncio.run(ask_all(url, prompts_of(2, [16, 64], 4000, seed=1), 6, answers))
    assert len(answers.first) == len(answers.failures) == 2
    assert "the prompt is 64 tokens long and the context holds 60" in answers.failures[0]
    assert len(answers.between) <= 2 * 6
    assert answers.rates[0] > 0

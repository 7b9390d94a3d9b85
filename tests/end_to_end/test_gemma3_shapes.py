# SPDX-License-Identifier: Apache-2.0
"""The small vision model answers questions about pictures outside its training data, through ORT GenAI."""

import io
import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.fixtures.shapes_pictures import draw, random_question, random_scene

SEED = 20261122  # training draws from seeds that are texts
PICTURES = 12
QUESTIONS_EACH = 4

# The share of right answers that the model has to reach. Answers are deterministic, and metadata.json says what
# training ended with: the margin is for other pictures (these few have 0.94), not for other runs.
LEAST_RIGHT = 0.9

Answer = Callable[[Image.Image, str], str]


@pytest.fixture(scope="module")
def folder(converted: Callable[..., Path]) -> Path:
    return converted("gemma3-shapes")


def open_model(genai: Any, folder: Path) -> Answer:
    """Returns a function that asks the model a question about a picture, and returns its greedy answer."""
    model = genai.Model(str(folder))
    tokenizer, processor = genai.Tokenizer(model), model.create_multimodal_processor()

    def answer(picture: Image.Image, question: str) -> str:
        file = io.BytesIO()
        picture.save(file, "png")
        turn = json.dumps([{"role": "user", "content": f"<start_of_image>{question}"}])
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True)
        inputs = processor(prompt, images=genai.Images.open_bytes(file.getvalue()))
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(do_sample=False, max_length=400)
        generator = genai.Generator(model, parameters)
        generator.set_inputs(inputs)
        tokens = []
        while not generator.is_done():
            generator.generate_next_token()
            tokens.append(generator.get_next_tokens()[0])
        return str(tokenizer.decode(tokens))

    return answer


@pytest.fixture(scope="module")
def answer(genai: Any, folder: Path) -> Answer:
    return open_model(genai, folder)


def test_answers_held_out_pictures(answer: Answer) -> None:
    """48 questions on 12 pictures of many sizes, with a seed that training does not use."""
    generator = random.Random(SEED)
    right, wrong = defaultdict[str, int](int), []
    for _ in range(PICTURES):
        scene = random_scene(generator)
        picture = draw(scene, generator.randint(100, 600))
        for question in (random_question(scene, generator) for _ in range(QUESTIONS_EACH)):
            said = answer(picture, question.question)
            if said == question.answer:
                right[question.kind] += 1
            else:
                wrong.append((question, said))
    total = sum(right.values()) + len(wrong)
    assert total == PICTURES * QUESTIONS_EACH
    assert len(right) == 6, f"expected right answers to every kind of question, got {dict(right)}"
    assert sum(right.values()) >= LEAST_RIGHT * total, f"{len(wrong)} of {total} are wrong: {wrong}"


def test_int8_cache_answers_about_picture(genai: Any, answer: Answer, converted: Callable[..., Path]) -> None:
    """A picture's tokens see one another through rounded keys; its answers are those that a bf16 cache gives."""
    rounded = open_model(genai, converted("gemma3-shapes", kv_dtype="int8"))
    pictures = [draw(random_scene(random.Random(seed)), 256) for seed in range(6)]
    assert [rounded(picture, "What is this?") for picture in pictures] == [
        answer(picture, "What is this?") for picture in pictures
    ]


def test_answers_depend_on_picture(answer: Answer) -> None:
    """The same question has other answers for other pictures: the model does not answer from the words alone."""
    said = {answer(draw(random_scene(random.Random(seed)), 256), "What is this?") for seed in range(12)}
    assert len(said) >= 10, f"expected a description for each picture, got {sorted(said)}"

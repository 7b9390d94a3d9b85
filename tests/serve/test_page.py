# SPDX-License-Identifier: Apache-2.0
"""The chat page in Debian's Chromium: typing, clicking, and the shown content."""

import json
import random
import re

import pytest

from scripts import tools
from tests.fixtures.shapes_pictures import draw, questions, random_scene

api = pytest.importorskip("playwright.sync_api", reason="needs the extra test")
PROGRAM = tools.find("chromium")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=tools.reason("chromium"))

QUESTION = "Tell me about loops."
# JSON that does not end by itself: an answer that can be stopped.
SCHEMA = {"type": "array", "items": {"const": "abc"}, "minItems": 5000}
ENDLESS = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "endless", "schema": SCHEMA}},
    # The small model writes 2000 tokens in a second; with these it takes three.
    "logprobs": True,
    "top_logprobs": 20,
}


@pytest.fixture(scope="module")
def server(start_server, topics, shapes):
    return start_server(topics, f"seeing={shapes}", "--context", 2048)


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as started:
        # As root Chromium has no sandbox; what it opens here is our own page.
        browser = started.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """The page in a browser without stored data; errors in it and requests to other servers fail the test."""
    context = browser.new_context()
    page = context.new_page()
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.address)
    page.wait_for_selector("#model option", state="attached")
    yield page
    # The browser reports failed requests as well, which the page shows by itself.
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []
    assert [url for url in asked if not url.startswith((server.address, "data:", "blob:"))] == []
    context.close()


def say(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def wait_for_answer(page):
    api.expect(page.get_by_role("status")).to_have_text(re.compile("^Answered"))
    return page.locator("#log .assistant .text").last.inner_text()


def test_answer_equals_api_and_survives_reload(page, server):
    answer = server.openai().chat.completions.create(model="topics", messages=[{"role": "user", "content": QUESTION}])
    expected = answer.choices[0].message.content
    say(page, QUESTION)
    assert wait_for_answer(page) == expected.strip()
    speed = page.locator("#log .speed").inner_text()
    tokens = answer.usage.completion_tokens
    assert re.fullmatch(rf"{tokens} tokens, [\d.]+ tokens/s, first token after [\d.]+ s", speed)
    page.reload()
    assert page.locator("#log .user .text").inner_text() == QUESTION
    assert page.locator("#log .assistant .text").inner_text() == expected.strip()
    assert page.locator("#log .speed").inner_text() == speed


def test_text_streams_and_stops(page, server):
    def endless(route):
        route.continue_(post_data=json.dumps(route.request.post_data_json | ENDLESS))

    page.route("**/v1/chat/completions", endless)
    # On a busy machine all of the answer would be there before the browser is asked: some 4 MB, here in 40 seconds.
    slow = {"offline": False, "latency": 0, "downloadThroughput": 100_000, "uploadThroughput": -1}
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", slow)
    say(page, QUESTION)
    api.expect(page.locator("#log .assistant .text")).to_have_text(re.compile(".{20}"))
    api.expect(page.get_by_role("button", name="Send")).to_be_hidden()
    page.get_by_role("button", name="Stop").click()
    api.expect(page.get_by_role("status")).to_have_text("Stopped.")
    text = page.locator("#log .assistant .text").inner_text()
    assert text.startswith('["abc","abc"')
    assert len(text) < 6 * 2000
    # The Escape key stops an answer, too, and the conversation goes on.
    say(page, QUESTION)
    api.expect(page.locator("#log .assistant .text").nth(1)).to_have_text(re.compile(".{20}"))
    page.keyboard.press("Escape")
    page.wait_for_selector("#stop", state="hidden")
    assert server.http().get("/health").json()["status"] == "ok"


def test_picture_is_shown_and_answered(page, tmp_path):
    scene = random_scene(random.Random(1))
    draw(scene, 1500).save(tmp_path / "shapes.png")
    asked = next(question for question in questions(scene) if question.question == "What is this?")
    page.get_by_label("Model").select_option("seeing")
    page.locator("#file").set_input_files(tmp_path / "shapes.png")
    page.get_by_role("img", name="shapes.png").wait_for()
    say(page, asked.question)
    assert wait_for_answer(page) == asked.answer
    # After a reload the picture is there with the conversation, smaller, because browsers store little; the model too.
    page.reload()
    picture = page.locator("#log .user img")
    assert picture.get_attribute("alt") == "shapes.png"
    picture.evaluate("image => image.decode()")
    assert picture.evaluate("image => image.naturalWidth") == 1024
    page.wait_for_selector("#model option", state="attached")
    assert page.get_by_label("Model").input_value() == "seeing"


def test_settings_reach_server_and_are_kept(page):
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tokens at most").fill("5")
    page.get_by_label("Colours").select_option("dark")
    page.keyboard.press("Escape")
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, QUESTION)
    body = sent.value.post_data_json
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 5, True)
    assert "top_p" not in body
    wait_for_answer(page)
    assert "5 tokens," in page.locator("#log .speed").inner_text()
    page.reload()
    assert page.locator("#system").input_value() == "Be brief."
    assert page.locator("html").get_attribute("data-theme") == "dark"


def test_conversations_are_kept_apart(page):
    for text in ("Strings", "Numbers"):
        say(page, text)
        wait_for_answer(page)
        page.get_by_role("button", name="New conversation", exact=True).first.click()
    titles = page.locator("#conversations li button:first-child")
    assert titles.all_inner_texts() == ["New conversation", "Numbers", "Strings"]
    page.get_by_role("button", name="Strings", exact=True).click()
    assert page.locator("#log .user .text").inner_text() == "Strings"
    page.get_by_role("button", name="Delete Strings").click()
    assert "Strings" not in titles.all_inner_texts()
    assert page.evaluate("JSON.parse(localStorage['flownpu.conversations']).length") == 2


def test_error_is_shown_and_left_out_of_next_request(page):
    say(page, "word " * 3000)
    error = page.locator("#log .error")
    error.wait_for()
    assert "the context holds 2048" in error.inner_text()
    say(page, QUESTION)
    wait_for_answer(page)


def test_key_is_asked_for_and_sent(browser, start_server, topics):
    server = start_server(topics, FLOWNPU_API_KEY="open sesame")
    page = browser.new_context().new_page()
    page.goto(server.address)
    api.expect(page.get_by_role("status")).to_have_text(re.compile("expected the server's key"))
    page.get_by_label("Key of the server").fill("open sesame")
    page.keyboard.press("Tab")
    page.wait_for_selector("#model option", state="attached")
    say(page, QUESTION)
    assert wait_for_answer(page)
    page.context.close()


def test_markup_in_text_is_text(page):
    text = "<img src=x onerror=alert(1)> and\n```python\nfor x in y:\n```\nmore"
    say(page, text)
    wait_for_answer(page)
    assert page.locator("#log .user img").count() == 0
    assert "<img src=x onerror=alert(1)>" in page.locator("#log .user .text").inner_text()
    assert page.locator("#log .user pre").inner_text() == "for x in y:\n"


def test_page_works_with_keyboard_and_screen_reader(page):
    """Every control has a name, and Tab reaches all of them in the order of the page."""
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.get_by_label("Message", exact=True).fill("first")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second")
    assert page.get_by_label("Message", exact=True).input_value() == "first\nsecond"
    tree = page.locator("body").aria_snapshot()
    for role in ("navigation", "main", "status", "list"):
        assert role in tree
    nameless = page.locator("button:visible, input:visible, select:visible, textarea:visible").evaluate_all(
        "all => all.filter(one => !(one.textContent.trim() || one.ariaLabel || one.labels?.length)).map(one => one.id)"
    )
    assert nameless == []
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    reached = []
    for _ in range(9):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert reached == ["Skip to the message", "new", *reached[2:4], "model", "Settings", "log", "prompt", "attach"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_colours_have_contrast(browser, server):
    """Texts against their background, by WCAG 2.2's formula and its bound for normal text: 4.5."""
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(server.address)
        for text, behind in [
            ("text", "page"),
            ("quiet", "page"),
            ("quiet", "panel"),
            ("text", "own"),
            ("text", "panel"),
            ("on-accent", "accent"),
            ("wrong", "page"),
        ]:
            colours = [page.evaluate(COMPUTED, f"var(--{name})") for name in (text, behind)]
            lighter, darker = sorted(map(luminance, colours), reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (scheme, text, behind)
        context.close()


COMPUTED = """colour => {
    const element = document.body.appendChild(document.createElement('i'));
    element.style.color = colour;
    return getComputedStyle(element).color.match(/[0-9.]+/g).slice(0, 3).map(Number);
}"""


def luminance(colour):
    """Relative luminance of an sRGB colour of 0 to 255 (WCAG 2.2)."""
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in (c / 255 for c in colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

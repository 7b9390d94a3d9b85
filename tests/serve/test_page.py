# SPDX-License-Identifier: Apache-2.0
"""The chat page in Debian's Chromium: typing, clicking, and the shown content."""

import json
import random
import re

import pytest

from scripts import tools
from tests.fixtures.shapes_pictures import draw, questions, random_scene

api = pytest.importorskip("playwright.sync_api", reason="needs the extra test")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the extra test")
PROGRAM = tools.find("chromium")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=tools.reason("chromium"))

# Markup that runs a script wherever a page takes it as HTML.
BAD = "<img src=x onerror=document.title='bad'>"
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
    return start_server(topics, f"seeing={shapes}", "--context", 2048, "--alias", f"{BAD}=seeing")


@pytest.fixture(scope="module")
def browser():
    api.expect.set_options(timeout=30_000)  # of milliseconds: a busy machine loads a model in more than the usual 5 s
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
    used = f"{answer.usage.total_tokens} of the context's 2048 tokens"
    assert re.fullmatch(rf"{tokens} tokens(, [\d.]+ tokens/s)?, first token after [\d.]+ s, {used}", speed)
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


def answer_with(page, *parts):
    """Has the server's next answers be these parts of messages."""
    chunks = [{"choices": [{"index": 0, "delta": part, "finish_reason": None}]} for part in parts]
    end = {"choices": [], "usage": {"completion_tokens": 3, "total_tokens": 9}}
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, end]) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


MARKDOWN = f"""# Loops & *more*

A [link](https://example.com/a) and [none](javascript:document.title='bad'), `a < b`, {BAD} &lt;b&gt;

![picture](https://example.com/x.png)

<script>document.title = "bad"</script>

2. two
3. three
   - [x] done

| a | b |
|---|---|
| 1 | **2** |

> said

```python
for x in "abc":  # {BAD}
    pass
```
"""


def test_markdown_is_shown(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer_with(page, {"content": MARKDOWN[:200]}, {"content": MARKDOWN[200:]})
    say(page, QUESTION)
    wait_for_answer(page)
    said = page.locator("#log .assistant .text")
    assert said.locator("h3").inner_text() == "Loops & more"
    assert said.locator("a").evaluate_all("all => all.map(one => one.href)") == [
        "https://example.com/a",
        "https://example.com/x.png",
    ]
    assert said.locator("a").first.get_attribute("rel") == "noopener noreferrer nofollow"
    assert said.locator("ol").get_attribute("start") == "2"
    assert said.locator("li").last.inner_text() == "☑ done"
    assert said.locator("td").all_inner_texts() == ["1", "2"]
    assert said.locator("blockquote").inner_text() == "said"
    assert said.locator(".code-keyword").all_inner_texts() == ["for", "in", "pass"]
    assert "<b>" in said.inner_text()
    said.get_by_role("button", name="Copy").click()
    api.expect(said.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == f'for x in "abc":  # {BAD}\n    pass'


def test_markup_in_any_text_is_text(page):
    """The texts: an answer, its thoughts and calls, a message, a conversation's title, a model's name; also after a
    reload.
    """
    page.get_by_label("Model").select_option(BAD)
    call = {"index": 0, "function": {"name": BAD, "arguments": json.dumps({"x": BAD})}}
    answer_with(page, {"reasoning_content": BAD}, {"content": MARKDOWN}, {"tool_calls": [call]})
    say(page, BAD)
    wait_for_answer(page)
    for _ in range(2):
        assert page.locator("img, script:not([src])").count() == 0
        assert page.title() == "FlowNPU"
        assert page.locator("#log .user .text").inner_text() == BAD
        assert page.locator("#log .assistant h2").inner_text() == BAD
        assert page.locator("#conversations button").first.inner_text() == BAD
        assert page.locator("#log .call summary").inner_text() == f"Calls {BAD}"
        assert BAD in page.locator("#log .call code").inner_text()
        assert page.locator("#log .thought div").text_content() == BAD
        page.reload()


def test_thoughts_are_folded(page):
    answer_with(page, {"reasoning_content": "Let me "}, {"reasoning_content": "see."}, {"content": "Seen."})
    say(page, QUESTION)
    assert wait_for_answer(page) == "Seen."
    thought = page.locator("#log .thought div")
    api.expect(thought).to_be_hidden()
    page.get_by_text("Thoughts", exact=True).click()
    api.expect(thought).to_have_text("Let me see.")


def test_message_is_edited_and_answer_made_anew(page):
    for text in ("first", "second"):
        say(page, text)
        wait_for_answer(page)
    page.get_by_role("button", name="Edit").nth(1).click()
    page.keyboard.press("Escape")
    assert page.get_by_label("Message", exact=True).input_value() == ""
    page.get_by_role("button", name="Edit").nth(1).click()
    assert page.get_by_label("Message", exact=True).input_value() == "second"
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "other")
    messages = sent.value.post_data_json["messages"]
    assert [one["content"] for one in messages if one["role"] == "user"] == ["first", "other"]
    wait_for_answer(page)
    assert page.locator("#log .user .text").all_inner_texts() == ["first", "other"]
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Regenerate").click()
    assert sent.value.post_data_json["messages"] == messages
    wait_for_answer(page)
    assert page.locator("#log > li").count() == 4


def test_answers_of_several_models_stand_side_by_side(page, tmp_path):
    """The conversation goes on with the one that is taken, also after a reload, an export and an import."""
    say(page, QUESTION)
    first = wait_for_answer(page)
    page.get_by_label("Model").select_option(BAD)
    answer_with(page, {"content": BAD})
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Another beside it").click()
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": QUESTION}]
    assert sent.value.post_data_json["model"] == BAD
    assert wait_for_answer(page) == BAD
    answers = page.locator("#log .assistant section")
    places = answers.evaluate_all("all => all.map(one => one.getBoundingClientRect()).map(({x, y}) => [x, y])")
    assert places[0][0] < places[1][0]
    assert places[0][1] == places[1][1]
    page.get_by_role("button", name="Go on with this").click()
    for _ in range(2):
        assert answers.locator(".text").all_inner_texts() == [BAD, first]
        assert answers.locator("h2").all_inner_texts() == [BAD, "topics"]
        page.reload()
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "More")
    assert [one["content"] for one in sent.value.post_data_json["messages"]] == [QUESTION, BAD, "More"]
    wait_for_answer(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "kept.json")
    page.locator("#exported").set_input_files(tmp_path / "kept.json")
    api.expect(page.get_by_role("status")).to_have_text("1 conversation is imported.")
    assert answers.locator(".text").all_inner_texts() == [BAD, first, BAD]
    assert page.locator("img, script:not([src])").count() == 0


def test_conversations_are_exported_and_imported(page, tmp_path):
    say(page, QUESTION)
    text = wait_for_answer(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "kept.json")
    page.get_by_role("button", name=f"Delete {QUESTION}").click()
    page.locator("#exported").set_input_files(tmp_path / "kept.json")
    api.expect(page.get_by_role("status")).to_have_text("1 conversation is imported.")
    assert page.locator("#log .assistant .text").inner_text() == text
    kept = json.loads((tmp_path / "kept.json").read_text())
    kept["conversations"][0]["messages"][0] |= {"images": [{"name": "x", "url": "https://example.com/x.png"}]}
    (tmp_path / "remote.json").write_text(json.dumps(kept))
    page.locator("#exported").set_input_files(tmp_path / "remote.json")  # the page asks no other server
    api.expect(page.locator("#conversations li")).to_have_count(3)
    assert page.locator("#log img").count() == 0
    for wrong in ("{}", "no JSON", '{"conversations": [{"title": "x", "messages": [{"role": "system", "text": 1}]}]}'):
        (tmp_path / "wrong.json").write_text(wrong)
        page.locator("#exported").set_input_files(tmp_path / "wrong.json")
        api.expect(page.get_by_role("status")).to_have_text("The file holds no conversations of this page.")


def test_images_are_pasted_and_dropped(page):
    for kind, target, field in (("paste", "#prompt", "clipboardData"), ("drop", "#log", "dataTransfer")):
        page.evaluate(
            """async ([kind, target, field]) => {
                const canvas = new OffscreenCanvas(8, 8);
                canvas.getContext("2d").fillRect(0, 0, 8, 8);
                const data = new DataTransfer();
                data.items.add(new File([await canvas.convertToBlob()], `${kind}.png`, { type: "image/png" }));
                const made = kind === "paste" ? ClipboardEvent : DragEvent;
                document.querySelector(target).dispatchEvent(new made(kind, { [field]: data, bubbles: true }));
            }""",
            [kind, target, field],
        )
        page.get_by_role("img", name=f"{kind}.png").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, server, scheme):
    """Deque's rules, for WCAG and good practice, on a conversation with all that one can have; on a phone, too."""
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(server.address)
    page.wait_for_selector("#model option", state="attached")
    call = {"index": 0, "function": {"name": "find", "arguments": "{}"}}
    answer_with(page, {"reasoning_content": "Hm."}, {"content": MARKDOWN}, {"tool_calls": [call]})
    say(page, QUESTION)
    wait_for_answer(page)
    page.get_by_role("button", name="Another beside it").click()
    api.expect(page.locator("#log .call")).to_have_count(2)
    wait_for_answer(page)
    page.get_by_text("Thoughts", exact=True).first.click()
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 700})
        found = axe.Axe().run(page).response["violations"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.get_by_text("Settings", exact=True).click()
    context.close()


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
    for _ in range(11):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    beside = ["Skip to the message", "new", *reached[2:4], "export", "import"]
    assert reached == [*beside, "model", "Settings", "log", "prompt", "attach"]
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

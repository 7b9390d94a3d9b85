# SPDX-License-Identifier: Apache-2.0
"""Draws chat-light.png, chat-dark.png and chat-phone.png in docs/figures/: the chat page, asked about a picture.

    python -m scripts.figures.chat_page out/gemma3-shapes

The model is tests/fixtures/gemma3-shapes, converted; the picture is one that its tests ask about.
"""

import io
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

from scripts import tools
from tests.fixtures.shapes_pictures import draw, random_scene

FIGURES = Path(__file__).resolve().parent.parent.parent / "docs" / "figures"
SIZE, PHONE = ViewportSize(width=1000, height=860), ViewportSize(width=390, height=844)
PICTURES: tuple[tuple[str, Literal["light", "dark"], ViewportSize], ...] = (
    ("light", "light", SIZE),
    ("dark", "dark", SIZE),
    ("phone", "light", PHONE),
)
COLOURS = 64
SEED = 24  # gives a picture with three shapes
QUESTIONS = ("What is this?", "What color is the square?")


def main(model: Path) -> None:
    """Starts a server, chats with it in a browser, and saves screenshots."""
    command = [sys.executable, "-c", "from flownpu.cli import main; main()", "serve", str(model), "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    address = next(line.split()[2] for line in server.stderr if line.startswith("Listening on"))
    try:
        with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / "shapes.png"
            draw(random_scene(random.Random(SEED)), 448).save(picture)  # noqa: S311 a picture, not a secret
            browser = playwright.chromium.launch(executable_path=tools.find("chromium"), args=["--no-sandbox"])
            for name, scheme, size in PICTURES:
                page = browser.new_page(viewport=size, color_scheme=scheme)
                page.goto(address)
                talk(page, picture)
                save(page.screenshot(), FIGURES / f"chat-{name}.png")
            browser.close()
    finally:
        server.terminate()
        server.communicate()


def talk(page: Page, picture: Path) -> None:
    """A conversation of a few turns, the first about a picture."""
    page.locator("#file").set_input_files(picture)
    expect(page.locator("#images img")).to_have_count(1)
    for question in QUESTIONS:
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        expect(page.locator("#log .speed")).to_have_count(QUESTIONS.index(question) + 1, timeout=60_000)


def save(screenshot: bytes, file: Path) -> None:
    """Writes a screenshot with few colours, which makes the file a third as large."""
    Image.open(io.BytesIO(screenshot)).convert("RGB").quantize(COLOURS).save(file, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

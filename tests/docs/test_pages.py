# SPDX-License-Identifier: Apache-2.0
"""The documentation agrees with the code: links, options, operators, commands."""

import importlib.util
import re
from typing import get_args

import pytest

from flownpu.cli.options import Activations, Device
from scripts.figures import npu_designs
from tests.docs.pages import PAGES, ROOT, table

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
            assert anchor in anchors, link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    for text in CODE.findall(page.read_text(encoding="utf-8")):
        if re.fullmatch(r"(aie|benchmarks|ep|ops|scripts|tests|docs|graph_rewrites|python)/[\w./-]+", text):
            assert (ROOT / text).exists(), text


def test_option_table_has_the_providers_options():
    source = (ROOT / "ep" / "options.cc").read_text(encoding="utf-8")
    parsers = source[source.index("kParsers{{") :]
    keys = re.findall(r'^    \{"(\w+)",', parsers, re.MULTILINE)
    rows = table("docs/use/options.md", "key")
    assert [CODE.findall(row[0])[0] for row in rows] == keys
    for row in rows:
        # choose<...>("device", value, {{{"auto", ...}, ...}}) lists the values of an option that has a list of them.
        choices = re.search(rf'"{CODE.findall(row[0])[0]}", value,\s*(\{{\{{.*?\}}\}}\}})\)', parsers, re.DOTALL)
        if choices:
            assert CODE.findall(row[1]) == re.findall(r'\{"(\w+)"', choices.group(1)), row[0]


def test_command_line_offers_the_providers_values():
    rows = {CODE.findall(row[0])[0]: CODE.findall(row[1]) for row in table("docs/use/options.md", "key")}
    assert rows["device"] == list(get_args(Device))
    assert rows["activations"] == list(get_args(Activations))


def test_command_line_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("write_command_line", ROOT / "scripts" / "write_command_line.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (ROOT / "docs" / "use" / "command-line.md").read_text(encoding="utf-8")
    assert text == script.page(), "run: python scripts/write_command_line.py"


def test_design_figures_are_up_to_date():
    for path, picture in npu_designs.pictures().items():
        assert path.read_text(encoding="utf-8") == picture, f"{path.name}: run python scripts/figures/npu_designs.py"

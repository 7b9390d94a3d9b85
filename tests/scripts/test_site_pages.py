# SPDX-License-Identifier: Apache-2.0
"""The documentation site: links to pages with another place there, and links to sources."""

import pytest

pytest.importorskip("mkdocs", reason="needs the extra dev")

from flownpu.cli import application
from scripts.site_pages import in_site
from scripts.write_command_line import reference


@pytest.mark.parametrize(
    ("folder", "link", "shown"),
    [
        ("", "[a](docs/npu.md#prefill)", "[a](npu.md#prefill)"),
        ("", "![a](docs/figures/demo.svg)", "![a](figures/demo.svg)"),
        ("", "[a](CONTRIBUTING.md)", "[a](contributing.md)"),
        ("docs", "[a](../README.md)", "[a](index.md)"),
        ("docs", "[a](npu.md)", "[a](npu.md)"),
        ("docs", "[a](#words)", "[a](#words)"),
        ("docs", "[a](https://example.org/x)", "[a](https://example.org/x)"),
        ("docs", "[a](use/serve.md)", "[a](use/serve.md)"),
        ("docs/use", "[a](serve.md#words)", "[a](serve.md#words)"),
        ("docs/use", "[a](../npu.md)", "[a](../npu.md)"),
        ("docs/use", "[a](../../CONTRIBUTING.md)", "[a](../contributing.md)"),
        ("docs/use", "[`a`](../../ops/npu)", "[`a`](https://example.org/flownpu/blob/main/ops/npu)"),
        ("docs", "[`a`](../ops/npu)", "[`a`](https://example.org/flownpu/blob/main/ops/npu)"),
    ],
)
def test_links_are_rewritten_for_site(folder: str, link: str, shown: str) -> None:
    assert in_site(link, folder, "https://example.org/flownpu") == shown


def test_missing_source_site_leaves_text() -> None:
    assert in_site("see [`ops/npu`](../ops/npu) too", "docs", None) == "see `ops/npu` too"


def test_reference_of_site_has_options_of_every_command() -> None:
    sections = dict(section.split("\n", 1) for section in reference().split("\n## ")[1:])
    assert list(sections) == [command.name for command in application().registered_commands]
    assert "| `--weights` auto\\|q4\\|q8\\|8/4/4\\|4.75 | Bits: " in sections["convert"]
    assert "`--activations`" in sections["run"]

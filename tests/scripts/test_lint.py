# SPDX-License-Identifier: Apache-2.0
"""The checks of style: the hook for comments, and the report of clang-tidy."""

import re
from pathlib import Path

import pytest
import yaml

from scripts import lint

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ('"""Of an image."""', True),
        ("x = 1  # Of a tile", True),
        ("// Of a tile.", True),
        ('"""Patches of an image."""', False),
        ("// Of course.", False),
    ],
)
def test_comments_hook_finds_a_comment_without_a_subject(text: str, is_found: bool) -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (hook,) = (hook for hook in config["repos"][0]["hooks"] if hook["id"] == "comments")
    assert bool(re.search(hook["entry"], text)) is is_found


def test_tidy_reports_a_finding_of_several_units_once(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = "/tree/ops/error.h:3:1: error: unused\n   3 | int x;\n"
    said = {"cmake": "", "clang-tidy": f"2 warnings generated.\n{finding}"}
    monkeypatch.setattr(lint, "complaints", lambda name, *_: said[name])
    assert lint.tidy([Path("one.cc"), Path("two.cc")]) == finding
    said["clang-tidy"] = ""
    assert lint.tidy([Path("one.cc")]) == ""
    said["clang-tidy"] = "clang-tidy failed\n"
    assert lint.tidy([Path("one.cc")]) == "clang-tidy failed\n"

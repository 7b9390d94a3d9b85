# SPDX-License-Identifier: Apache-2.0
"""The tests that `make check` runs for a change."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from scripts import check, lint

ROOT = Path(__file__).parents[2]


def chosen(*names: str) -> list[str]:
    return check.tests_of([Path(name) for name in names])


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("ep/partition/planner.cc", ["tests/ep"]),
        ("ops/nodes/contract.cc", ["tests/ops"]),
        ("ops/lowering/qk_norm.cc", ["tests/ops/lowering"]),
        ("graph_rewrites/plain/rms_norm.py", ["graph_rewrites/plain", "tests/rewrites/test_signatures.py"]),
        ("docs/npu.md", ["tests/docs"]),
        ("tests/ep/test_names.py", ["tests/ep/test_names.py"]),
        ("tests/ep/conftest.py", ["tests/ep"]),
        ("tests/fuzz/graphs/builder.py", ["tests/fuzz/graphs"]),
        (".gitignore", []),
    ],
)
def test_changed_layer_selects_its_tests(changed: str, tests: list[str]) -> None:
    assert chosen(changed) == tests


def test_changed_command_selects_tests_that_name_or_import_it() -> None:
    assert "tests/cli/generate/test_run.py" in chosen("python/flownpu/cli/run.py")
    importing = chosen("python/flownpu/registration.py")
    assert "tests/cli/test_registration.py" in importing
    assert all("flownpu" in (ROOT / test).read_text(encoding="utf-8") for test in importing)


def test_tests_of_several_files_are_named_once() -> None:
    assert chosen("tests/ep/test_names.py", "ep/partition/planner.cc", "ep/partition/planner.h") == ["tests/ep"]


def test_selection_has_the_code_blocks_of_changed_pages_only() -> None:
    assert check.selection([Path("docs/q4nx.md"), Path("ep/ep.cc")]) == [
        "-k",
        "not test_marked_code_block_succeeds or docs/q4nx.md",
    ]
    assert check.selection([Path("ep/ep.cc")]) == ["-k", "not test_marked_code_block_succeeds"]


def test_branched_from_is_the_common_ancestor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "--initial-branch", "main")
    git("commit", "--allow-empty", "-m", "common")
    common = git("rev-parse", "HEAD")
    git("checkout", "-b", "ours")
    git("commit", "--allow-empty", "-m", "ours")
    git("checkout", "main")
    git("commit", "--allow-empty", "-m", "theirs")
    git("checkout", "ours")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert check.branched_from("main") == common
    assert check.branched_from("none") is None


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

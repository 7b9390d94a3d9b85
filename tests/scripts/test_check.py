# SPDX-License-Identifier: Apache-2.0
"""The tests that `make check` runs for a change."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import check, lint

ROOT = Path(__file__).parents[2]


def chosen(*names: str) -> list[str]:
    return check.tests_of([Path(name) for name in names])


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("ep/program/planner.cc", ["tests/ep"]),
        ("ops/nodes/contract.cc", ["tests/ops"]),
        ("ops/lowering/qk_norm.cc", ["tests/ops/lowering"]),
        ("graph_rewrites/plain/gelu.py", ["graph_rewrites/plain", "tests/rewrites/test_signatures.py"]),
        ("docs/npu.md", ["tests/docs"]),
        ("tests/ep/test_names.py", ["tests/ep/test_names.py"]),
        ("tests/ep/conftest.py", ["tests/ep"]),
        ("tests/fuzz/graphs/builder.py", ["tests/fuzz/graphs"]),
        (".gitignore", []),
        ("ops/no_such_file.cc", []),  # a file that was removed
    ],
)
def test_changed_layer_selects_its_tests(changed: str, tests: list[str]) -> None:
    assert chosen(changed) == tests


def test_changed_command_selects_tests_that_name_or_import_it() -> None:
    assert "tests/cli/generate/test_run.py" in chosen("python/flownpu/cli/run.py")
    importing = chosen("python/flownpu/registration.py")
    assert "tests/cli/test_registration.py" in importing
    assert all("flownpu" in (ROOT / test).read_text(encoding="utf-8") for test in importing)


def test_changed_helper_of_tests_selects_tests_that_use_it() -> None:
    assert "tests/fuzz/graphs/test_graphs.py" in chosen("tests/fuzz/operators/moves.py")


def test_compared_is_with_where_branch_was_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    assert check.branched_from("HEAD~1") == common
    assert check.branched_from("none") is None


def test_changed_folder_selects_its_tests_once() -> None:
    assert chosen("tests/ep/test_names.py", "ep/program/planner.cc", "ep/program/planner.h") == ["tests/ep"]


def test_selected_tests_exist_for_all_layers() -> None:
    for folder in (
        "aie/kernels",
        "aie/designs",
        "aie/cost",
        "ep",
        "graph_rewrites",
        "ops/cpu",
        "ops/lowering",
        "ops/npu",
    ):
        files = [file for file in sorted((ROOT / folder).rglob("*")) if file.suffix in lint.SOURCES]
        found = check.tests_of([file.relative_to(ROOT) for file in files])
        assert found, folder
        assert all((ROOT / test).exists() for test in found)


def test_changed_page_selects_its_blocks_alone() -> None:
    assert check.selection([Path("docs/q4nx.md"), Path("ep/ep.cc")]) == ["-k", "not test_block_runs or docs/q4nx.md"]
    assert check.selection([Path("ep/ep.cc")]) == ["-k", "not test_block_runs"]


# --- clang-tidy -------------------------------------------------------------------------------------------------------


def test_includes_are_followed() -> None:
    found = {file.relative_to(ROOT).as_posix() for file in lint.includes(ROOT / "ops" / "nodes" / "contract.cc")}
    assert {"ops/nodes/contract.cc", "ops/nodes/contract.h", "ops/error.h", "ops/nodes/tensor.h"} <= found


def test_changed_header_selects_unit_that_includes_it() -> None:
    units = [Path("ops/nodes/node.cc"), Path("ops/nodes/contract.cc"), Path("ep/names.cc")]
    units = [unit for unit in units if (ROOT / unit).exists()]
    assert lint.units_of({Path("ops/nodes/contract.h")}, units) == [Path("ops/nodes/contract.cc")]
    assert lint.units_of({Path("ops/error.h")}, [Path("ops/nodes/contract.cc")]) == [Path("ops/nodes/contract.cc")]
    assert lint.units_of({Path("README.md")}, units) == []


def test_clean_unit_is_read_again_after_included_file_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "build" / "tidy").mkdir(parents=True)
    (tmp_path / "one.h").write_text("int one;\n")
    unit = tmp_path / "one.cc"
    unit.write_text('#include "one.h"\n')
    read: list[str] = []
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    monkeypatch.setattr(lint, "BUILD", tmp_path / "build")
    monkeypatch.setattr(lint, "version_of", lambda _: "1")
    monkeypatch.setattr(lint, "complaints", lambda *arguments: read.append(arguments[-1]) or said)

    def readings(*commands: str) -> int:
        lint.includes.cache_clear()
        read.clear()
        lint.tidy_unit(unit, list(commands), fix=False)
        return len(read)

    said = "a finding"
    assert [readings("c++"), readings("c++")] == [1, 1]  # a unit with findings is read again
    said = ""
    assert [readings("c++"), readings("c++")] == [1, 0]
    assert readings("c++ -O3") == 1
    (tmp_path / "one.h").write_text("int two;\n")
    assert [readings("c++"), readings("c++")] == [1, 0]
    (tmp_path / ".clang-tidy").write_text("Checks: '*'\n")
    assert readings("c++") == 1


def test_units_are_read_as_one_where_that_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Units are not joined if they define the same names, or if a macro or a `using` of one would change another."""
    texts = {
        "one": "namespace {\nconstexpr int kSize = 1;\nint f(int x) { return x; }\n}\n",
        "two": "int g(int x) { return kOther; }\n",
        "same": "namespace {\nenum Sizes : std::uint8_t { kSmall, kSize };\n}\n",
        "and": "namespace {\nclass kSize final : public Base {\n};\n}\n",
        "macro": "#define SIZE 1\n",
        "using": "using std::vector;\n",
        "changes": "using std::kOther;\nclass kSmall;\nclass kSize;\n",
        "other": "int h() { return 1; }\n",
    }
    units = [tmp_path / f"{name}.cc" for name in texts]
    for unit, text in zip(units, texts.values(), strict=True):
        unit.write_text(text)
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    commands = {unit: [f"c++ -c {unit}"] for unit in units}
    commands[units[-1]] = [f"c++ -O3 -c {units[-1]}"]
    groups = [[unit.stem for unit in group] for group in lint.alike(units, commands)]
    assert groups == [["one", "two", "using"], ["same"], ["and"], ["macro"], ["changes"], ["other"]]


@pytest.mark.parametrize(("said", "read"), [("", ["0.cc"]), ("a finding", ["0.cc", "one.cc", "two.cc"])])
def test_joined_units_with_findings_are_read_apart(
    said: str, read: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".clang-tidy").write_text("Checks: '*'\n")
    (tmp_path / "aie").mkdir()
    (tmp_path / "aie" / ".clang-tidy").write_text("InheritParentConfig: true\n")
    units = [tmp_path / "aie" / "one.cc", tmp_path / "aie" / "two.cc"]
    for unit in units:
        unit.write_text(f"int {unit.stem};\n")
    found: list[str] = []
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    monkeypatch.setattr(lint, "BUILD", tmp_path / "build")
    monkeypatch.setattr(lint, "version_of", lambda _: "1")
    monkeypatch.setattr(lint, "complaints", lambda *arguments: found.append(Path(arguments[-1]).name) or said)
    joined = lint.write_joined(units, 0)
    assert joined.read_text() == f'#line 1 "{units[0]}"\nint one;\n#line 1 "{units[1]}"\nint two;\n'
    # clang-tidy takes the rules nearest to the joined file: they must be the units' rules.
    assert (joined.parent / ".clang-tidy").read_text() == "InheritParentConfig: true\n"
    commands = {unit: ["c++"] for unit in units}
    lint.tidy_group(0, units, commands=commands, fix=False)
    assert found == read
    assert all(lint.clean_mark(unit, commands[unit]).exists() != bool(said) for unit in units)


# --- Comments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ('"""{} an image."""', False),
        ("x = 1  # {} a tile", False),
        ("// {} a tile.", False),
        ('"""Patches {} an image."""', True),
        ("// {} course.", True),
    ],
)
def test_comment_beginning_is_checked(text: str, passed: bool, monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(text.format("of" if text.startswith('"""P') else "Of") + "\n")
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    assert lint.check_comments([Path("one.py")]) == passed

# SPDX-License-Identifier: Apache-2.0
"""How the tests find an mlir-opt: one that is new enough, or the reason why there is none."""

import pytest

from scripts import mlir_opt


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A path with one empty folder; the function that is returned adds a program to it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(mlir_opt, "FOLDER", tmp_path / "fetched")
    monkeypatch.setattr(mlir_opt, "SYSTEM", tmp_path / "lib")

    def add(name, *says, code=0):
        lines = "".join(f"/bin/echo '{line}'\n" for line in says)
        (folder / name).write_text(f"#!/bin/sh\n{lines}exit {code}\n")
        (folder / name).chmod(0o755)
        return str(folder / name)

    return add


@pytest.mark.parametrize(("release", "is_taken"), [(14, False), (16, False), (17, True), (22, True)])
def test_releases_that_read_properties_are_taken(tools, release, is_taken):
    path = tools("mlir-opt", "Debian LLVM version", f"Debian LLVM version {release}.1.8")
    assert mlir_opt.version_of(path) == release
    assert mlir_opt.find() == (path if is_taken else None)


def test_newer_mlir_opt_is_found_behind_older(tools):
    tools("mlir-opt", "LLVM version 14.0.6")
    newer = tools("mlir-opt-19", "LLVM version 19.1.7")
    tools("mlir-opt-22", "mlir-opt-22: error while loading shared libraries", code=127)
    assert mlir_opt.find() == newer


def test_missing_apt_is_kept_as_reason(tools, capsys):
    del tools  # the path is empty
    mlir_opt.main()
    assert (
        "this machine has no apt-get to get Debian's with. The tests that need it are skipped"
        in capsys.readouterr().out
    )
    assert mlir_opt.reason() == "mlir-opt is not installed, and this machine has no apt-get to get Debian's with"
    assert mlir_opt.find() is None


def test_missing_network_quotes_apt(tools, capsys):
    for name in ("apt-cache", "dpkg-deb", "dpkg-query"):
        tools(name)
    tools("apt-get", "Hit nothing", "E: Could not resolve the host", code=100)
    mlir_opt.main()
    assert "getting Debian's failed: apt-get update: E: Could not resolve the host" in capsys.readouterr().out

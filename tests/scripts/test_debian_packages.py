# SPDX-License-Identifier: Apache-2.0
"""Debian packages for the tests: the commands for apt, and the messages if it cannot get a package."""

import subprocess

import pytest

from scripts import tools
from scripts.debian_packages import Apt

KEYS = "/usr/share/keyrings/some-archive.gpg"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A machine with only the programs on its path that a test adds; each records its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name, script=""):
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/asked\n{script}\n')
        (folder / name).chmod(0o755)

    for name in ("apt-get", "apt-cache", "dpkg-deb", "dpkg-query"):
        add(name)
    return add


@pytest.fixture
def apt(tool, tmp_path):
    del tool
    return Apt(tmp_path / "fetched", "the thing")


def asked(tmp_path):
    return (tmp_path / "asked").read_text().splitlines()


def test_installed_dependencies_are_not_fetched(apt, tool):
    listed = ["mlir-22-tools", "  Depends: libmlir-22", "libmlir-22", "libc6", "<libvirtual>", "libz3-4"]
    tool("apt-cache", "".join(f"echo '{line}'\n" for line in listed))
    tool("dpkg-query", "echo 'libc6 installed'\necho 'libz3-4 config-files'\necho 'gcc installed'")
    assert apt.missing("mlir-22-tools") == ["libmlir-22", "libz3-4", "mlir-22-tools"]


@pytest.mark.parametrize("signed", [f"Signed-By: {KEYS}", f"deb [arch=amd64 signed-by={KEYS}] here", "nothing"])
def test_other_suite_is_fetched_from_mirror_of_machine(apt, tool, tmp_path, signed):
    """Only Debian's main archive is used as mirror: no other vendor's source, and not Debian's security updates."""
    source = tmp_path / "debian.sources"
    source.write_text(f"Types: deb\n{signed}\n")
    lines = [
        f"Vendor|Vendor|main|mirror-of-a-vendor/|{tmp_path}/vendor.list:1",
        f"Debian|Debian-Security|main|mirror-of-security/|{source}:7",
        f"Debian|Debian|contrib|mirror-of-debian/contrib|{source}:1",
        f"Debian|Debian|main|mirror-of-debian/|{source}:1",
    ]
    tool("apt-get", "case $1 in indextargets)\n" + "".join(f"echo '{line}'\n" for line in lines) + ";; esac")
    apt.use_suite("testing")
    lines = (apt.folder / "newer.sources").read_text().splitlines()
    assert lines[:4] == ["Types: deb", "URIs: mirror-of-debian/", "Suites: testing", "Components: main"]
    assert lines[4:] == ([] if signed == "nothing" else [f"Signed-By: {KEYS}"])
    assert f'Dir::Etc::sourcelist "{apt.folder}/newer.sources"' in (apt.folder / "apt.conf").read_text()
    assert asked(tmp_path)[-1] == "apt-get update -q"
    apt.use_machine()
    assert "sourcelist" not in (apt.folder / "apt.conf").read_text()


# --- Tools ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A separate folder for fetched packages."""
    monkeypatch.setattr(tools, "BUILD", tmp_path / "build")
    return tmp_path / "build"


def test_fetch_without_a_package_keeps_the_reason(tool, build, capsys):
    tool("apt-get", "echo 'E: no network' >&2; exit 100")
    tools.fetch("mlir-opt")
    failure = "mlir-opt is not installed, and getting Debian's failed: apt-get update: E: no network"
    assert capsys.readouterr().out.endswith(f"{failure}. The tests that need it are skipped\n")
    assert tools.reason("mlir-opt") == failure
    assert tools.find("mlir-opt") is None
    assert build.is_dir()


def test_fetched_program_starts_with_its_libraries(tool, build, capsys):
    tool("apt-cache", "echo 'mlir-14-tools - old'; echo 'mlir-19-tools - new'")
    tool("apt-get", "case $1 in download) : > one.deb ;; esac")
    folder = "$3/usr/lib/llvm-19/bin"
    program = r"printf '#!/bin/sh\necho $LD_LIBRARY_PATH\n'"
    files = f": > {folder}/../libone.so; {program} > {folder}/mlir-opt; /bin/chmod +x {folder}/mlir-opt"
    tool("dpkg-deb", f"/bin/mkdir -p {folder}; {files}")
    tools.fetch("mlir-opt")
    assert tools.find("mlir-opt") == str(build / "mlir-opt" / "mlir-opt")
    assert f"mlir-opt: {tools.find('mlir-opt')}" in capsys.readouterr().out
    done = subprocess.run([str(tools.find("mlir-opt"))], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(build / "mlir-opt/root/usr/lib/llvm-19")


# --- XRT --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fetched(tool, build):
    """A Debian mirror whose `testing` has XRT 2.25, and which lacks stable-backports."""
    folder = build / "xrt"
    tool(
        "apt-get",
        f"""case $1 in
        indextargets) echo 'Debian|Debian|main|mirror/|/dev/null:1' ;;
        update) if [ -f {folder}/newer.sources ]; then
            while read -r l; do [ "$l" = 'Suites: stable stable-backports' ] && exit 100; done < {folder}/newer.sources
        fi ;;
        download) : > $3.deb ;;
        esac
        exit 0""",
    )
    tool("apt-cache", f"[ -f {folder}/newer.sources ] && echo 'Candidate: 1:2.25.0' || echo 'Candidate: 202210.2.13'")
    tool(
        "dpkg-deb",
        "/bin/mkdir -p $3/usr/include/xrt; case $2 in *xrt-dev*) : > $3/usr/include/xrt/xrt_device.h ;; esac",
    )
    return folder


def test_xrt_is_of_first_suite_that_has_it(fetched, tmp_path):
    """The machine's own 202210.2.13 is an XRT of 2022."""
    tools.fetch("xrt-headers")
    assert "Suites: testing\n" in (fetched / "newer.sources").read_text()
    assert tools.find("xrt-headers") == str(fetched / "root/usr/include/xrt/xrt_device.h")
    assert asked(tmp_path)[-2:] == [
        "apt-get download -q libxrt-dev libxrt2",
        f"dpkg-deb -x {fetched}/packages/libxrt-dev.deb {fetched}/root",
    ]

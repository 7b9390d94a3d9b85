# SPDX-License-Identifier: Apache-2.0
"""Debian packages for the tests: the commands for apt, and the messages if it cannot get a package."""

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import tools
from scripts.debian_packages import Apt, UnavailableError
from tests.npu import debian_xrt

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


@pytest.mark.parametrize("missing", ["apt-get", "apt-cache", "dpkg-deb", "dpkg-query"])
def test_missing_apt_is_unavailable(tool, tmp_path, missing):
    del tool
    (tmp_path / "bin" / missing).unlink()
    with pytest.raises(UnavailableError, match=f"the thing is not installed, and this machine has no {missing} to get"):
        Apt(tmp_path / "fetched", "the thing")


def test_apt_keeps_its_state_in_folder(apt, tool, tmp_path):
    tool("apt-config", 'read -r line < "$APT_CONFIG"; echo "$line"; echo "$LC_ALL"; pwd')
    state, language, where = apt.run("apt-config").splitlines()
    assert state == f'Dir::State::lists "{apt.folder}/lists";'
    assert (language, where) == ("C", f"{apt.folder}/packages")
    assert "APT::Architecture" not in (apt.folder / "apt.conf").read_text()
    arm = (Apt(tmp_path / "arm", "the thing", "arm64").folder / "apt.conf").read_text()
    assert 'APT::Architecture "arm64";\nAPT::Architectures {"arm64";};\n' in arm


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


def test_machine_without_debian_is_unavailable(apt):
    with pytest.raises(
        UnavailableError, match="the thing is not installed, and this machine has no source of Debian's"
    ):
        apt.use_suite("testing")


# --- Tools ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A separate folder for fetched packages."""
    monkeypatch.setattr(tools, "BUILD", tmp_path / "build")
    return tmp_path / "build"


@pytest.mark.parametrize(("release", "is_found"), [(16, False), (17, True), (22, True)])
def test_mlir_opt_is_found_if_it_reads_properties(tool, build, release, is_found):
    del build
    tool(f"mlir-opt-{release}")
    assert (tools.find("mlir-opt") is not None) is is_found


def test_fetch_without_a_package_keeps_the_reason(tool, build, capsys):
    tool("apt-get", "echo 'E: no network' >&2; exit 100")
    tools.fetch("mlir-opt")
    failure = "mlir-opt is not installed, and getting Debian's failed: apt-get update: E: no network"
    assert capsys.readouterr().out.endswith(f"{failure}. The tests that need it are skipped\n")
    assert tools.reason("mlir-opt") == failure
    assert tools.find("mlir-opt") is None
    assert build.is_dir()


def test_reason_before_a_fetch_says_the_command(build):
    del build
    assert tools.reason("xrt") == "there is no xrt: python -m scripts.tools xrt gets it"


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


@pytest.mark.usefixtures("fetched")
def test_xrt_is_fetched_with_libraries(tool, build, tmp_path, monkeypatch, capsys):
    folder = build / "xrt/run"
    monkeypatch.setattr(debian_xrt, "FOLDER", folder)
    depends = "echo '  Depends: libc6\n  Depends: python3'; case $* in *libc6*) echo '  PreDepends: zlib1g' ;; esac"
    policy = "[ -f {}/newer.sources ] && echo 'Candidate: 1:{}.0' || echo 'Candidate: 1:2.19.0'"
    tool("apt-cache", f"case $1 in depends) {depends} ;; *) {policy.format(folder, '2.25')} ;; esac")
    libraries = "$3/usr/lib/any"
    files = f"{libraries}/libxrt_driver_xdna.so.2 {libraries}/ld-linux-any.so.2 $3/usr/bin/xclbinutil"
    tool("dpkg-deb", f"/bin/mkdir -p {libraries} $3/usr/bin; for file in {files}; do : > $file; done")
    tools.fetch("xrt")
    assert debian_xrt.libraries() == folder / "root/usr/lib/any"
    downloads = [line for line in asked(tmp_path) if "download" in line]
    assert downloads == ["apt-get download -q libc6 libxrt-npu2 libxrt-utils libxrt2 zlib1g"]
    command = debian_xrt.command(["program", "argument"], without=["libxrt_driver"])
    assert command[0] == f"{folder}/root/usr/lib/any/ld-linux-any.so.2"
    assert command[3:] == ["program", "argument"]
    assert [file.name for file in Path(command[2]).iterdir()] == ["ld-linux-any.so.2"]

    shutil.rmtree(folder)
    tool("apt-cache", policy.format(folder, "2.26"))
    tools.fetch("xrt")
    assert "none of Debian's suites stable-backports, testing, unstable has 2.25" in tools.reason("xrt")
    assert capsys.readouterr().out.endswith("The tests that need it are skipped\n")

# SPDX-License-Identifier: Apache-2.0
"""The checks of `flownpu doctor`, on a simulated Windows, of libraries that do not load, and of devices."""

import struct
import sys

import pytest

from flownpu.doctor import diagnosis, libraries
from flownpu.doctor.checks import Host, Status


def library_for(machine, path):
    """Writes the first bytes of a DLL: DOS' header, with the PE header's offset at 0x3c, and the machine it is for."""
    path.write_bytes(
        b"MZ".ljust(0x3C, b"\0") + struct.pack("<I", 0x80) + bytes(0x40) + b"PE\0\0" + struct.pack("<H", machine)
    )
    return path


@pytest.fixture
def windows(monkeypatch):
    monkeypatch.setattr(diagnosis, "IS_WINDOWS", True)
    monkeypatch.setattr(libraries, "IS_WINDOWS", True)
    monkeypatch.setattr("platform.machine", lambda: "AMD64")


@pytest.mark.parametrize(("machine", "found"), [
    (0x8664, "does not load: [WinError 126]"),
    (0xAA64, "is for aarch64, and this Python is of x86_64"),
    (0x14C, "is for i686, and this Python is of x86_64"),
])  # fmt: skip
@pytest.mark.usefixtures("windows")
def test_library_for_other_processor_is_bad(machine, found, tmp_path, monkeypatch):
    path = library_for(machine, tmp_path / "flownpu_ep.dll")
    monkeypatch.setattr(libraries, "get_library_path", lambda: str(path))

    def refuse(_):
        raise OSError("[WinError 126]")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    check = libraries.diagnose_provider()
    assert (check.status, check.found) == (Status.BAD, found)


@pytest.mark.usefixtures("windows")
def test_module_refused_by_windows_is_bad(tmp_path, monkeypatch):
    """Windows' message names no file, and is in the user's language."""
    path = library_for(0xAA64, tmp_path / "_native.pyd")

    def refuse(_):
        raise ImportError("DLL load failed while importing _native: ...", path=str(path))

    monkeypatch.setattr("importlib.import_module", refuse)
    assert libraries.diagnose_module().found == "is for aarch64, and this Python is of x86_64"


@pytest.mark.usefixtures("windows")
def test_devices_of_linux_alone_are_noted():
    found = {check.name: check for check in diagnosis.diagnose(Host())}
    for device in ("npu", "opencl"):
        assert found[device].status is Status.NOTE
        assert "on Linux alone" in found[device].found
    assert {"processor", "memory"} <= set(found)


@pytest.mark.usefixtures("windows")
def test_onnxruntime_without_microsofts_run_time_is_bad(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # its import fails
    check = next(check for check in diagnosis.diagnose_software() if check.name == "registration")
    assert check.status is Status.BAD
    assert "does not load" in check.found
    assert check.remedy == "winget install Microsoft.VCRedist.2015+.x64"

# SPDX-License-Identifier: Apache-2.0
"""A machine with an NPU, as XRT sees it: sysfs, and the double of the kernel's driver (tests/npu/xdna_driver/)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from scripts import xrt_runtime
from tests.npu import xrt

if TYPE_CHECKING:
    from collections.abc import Iterable

DRIVER = xrt.BUILT / "libxdna_driver.so"
# Of Linux 6.14 and newer: after so many ms without progress the driver ends a command.
WATCHDOG_MS = 2000


def require() -> None:
    """Skips the test where there is no XRT to run."""
    xrt.require()
    if xrt_runtime.find() is None:
        pytest.skip(xrt_runtime.reason())
    assert DRIVER.is_file(), f"expected {DRIVER}, which is built where there are headers of XRT: run `make test`"


class Machine:
    """A folder with its sysfs; `devices`: how many NPUs it has."""

    def __init__(self, folder: Path, *, devices: int = 1, name: str = "NPU Strix", watchdog: int = WATCHDOG_MS) -> None:
        self.root = folder / "machine"
        drivers = self.root / "sys/bus/pci/drivers/amdxdna"
        (self.root / "sys/bus/pci/devices").mkdir(parents=True)
        drivers.mkdir(parents=True)
        self.set_watchdog(watchdog)
        for number in range(devices):
            address = f"0000:c{5 + number}:00.1"
            device = self.root / f"sys/devices/pci0000:00/{address}"
            (device / f"accel/accel{number}").mkdir(parents=True)
            for file, content in [
                ("vbnv", name), ("device_type", "0"), ("vendor", "0x1022"), ("device", "0x17f0"), ("revision", "0x10"),
                ("fw_version", "255.0.5.35"),
            ]:  # fmt: skip
                (device / file).write_text(content + "\n", encoding="utf-8")
            for link in (drivers / address, self.root / "sys/bus/pci/devices" / address):
                link.symlink_to(os.path.relpath(device, link.parent))
            node = self.root / f"dev/accel/accel{number}"
            node.parent.mkdir(parents=True, exist_ok=True)
            node.touch()

    def set_watchdog(self, milliseconds: int | None) -> None:
        """The module's parameter; None: there is none, as before Linux 7."""
        file = self.root / "sys/module/amdxdna/parameters/tdr_timeout_ms"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        if milliseconds is not None:
            file.write_text(f"{milliseconds}\n", encoding="utf-8")

    def environment(self) -> dict[str, str]:
        """Of a process on this machine."""
        return os.environ | {
            "XDNA_DRIVER_ROOT": str(self.root.resolve()),
            "LD_PRELOAD": " ".join([*filter(None, [os.environ.get("LD_PRELOAD")]), str(DRIVER.resolve())]),
            "PYTHONPATH": os.pathsep.join([".", *filter(None, [os.environ.get("PYTHONPATH")])]),
            "FLOWNPU_TESTING_DIR": str(xrt.BUILT.resolve()),
        }

    def python(self, *arguments: str | Path, without: Iterable[str] = ()) -> list[str]:
        """A command that runs Python with XRT's libraries."""
        return xrt_runtime.command([sys.executable, *arguments], without=without)

# SPDX-License-Identifier: Apache-2.0
"""A machine with an NPU, as XRT sees it: sysfs, and the double of the kernel's driver (tests/npu/xdna_driver/).

Its processes run with Debian's XRT, which `make test` gets (scripts/tools.py), and the C library that this needs.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts import tools
from tests.built import BUILT
from tests.npu import debian_xrt, xrt
from tests.npu.firmware import DEVELOPED, Firmware, driver_log

ROOT = Path(__file__).parents[2]
# The driver ends a command after this many ms without progress. Linux 7 has 2000, which would make the tests slow.
WATCHDOG_MS = 100
# An environment variable: seconds that a session waits for a call; and its value here. An emulated call on a busy
# machine may take more than the default of 5 s.
TIME_LIMIT, BUSY = "FLOWNPU_NPU_TIMEOUT", "120"


def require() -> None:
    """Skips the test if XRT is missing, which building or running the plugin needs."""
    for name in ("xrt-headers", "xrt"):
        if tools.find(name) is None:
            pytest.skip(tools.reason(name))
    if not (xrt.PLUGIN.is_file() and xrt.DRIVER.is_file()):
        pytest.fail(f"expected {xrt.PLUGIN} and {xrt.DRIVER}, which are built where there is XRT: run `make test`")


def with_plugin(library: Path, folder: Path) -> Path:
    """A copy of the provider's library in a folder, with the plugin for XRT and the kernels beside it."""
    require()
    for file in (library, xrt.PLUGIN, *BUILT.glob("libflownpu_aie_xdna*.so")):
        shutil.copy(file, folder)
    return folder / library.name


def _write(folder: Path, **files: str) -> None:
    for name, content in files.items():
        (folder / name).write_text(content + "\n", encoding="utf-8")


class Machine:
    """A machine whose sysfs is in a folder.

    Args:
        folder: where the folder `machine` is made.
        devices: how many NPUs it has.
        driver: whether the driver is loaded; without it there is no device file.
        watchdog: the time of the driver's watchdog in ms; None: the driver has no such parameter.
        firmware: of the NPUs; None: there is none. An NPU whose firmware the driver does not take is on the bus, but
            has no device file, and the kernel's log says why.
        linux: the kernel's version.
        settings: of the driver's double (xdna_driver/state.h), such as "timelines=0".
        ini: lines of XRT's settings.
        time_limit: seconds that a session waits for a call.
    """

    def __init__(
        self,
        folder: Path,
        *,
        devices: int = 1,
        driver: bool = True,
        watchdog: int | None = WATCHDOG_MS,
        firmware: Firmware | None = DEVELOPED,
        linux: str = "7.3.4",
        settings: str = "",
        ini: str = "",
        time_limit: str = BUSY,
    ) -> None:
        self.root = folder / "machine"
        self._settings, self._ini, self._time_limit = settings, ini, time_limit
        self._firmware, self._linux = firmware, linux
        if firmware is not None:
            self._settings += f" protocol={xrt.setting_of(firmware)}"
            self._install(firmware)
        (self.root / "sys/bus/pci/devices").mkdir(parents=True)
        places = [self._add_device(number) for number in range(devices)]
        if driver:
            self._load_driver(watchdog, places)

    def _install(self, firmware: Firmware) -> None:
        """Puts firmware where linux-firmware does: Linux 7 looks for npu_7.sbin first, older ones for npu.sbin."""
        folder = self.root / "lib/firmware/amdnpu/17f0_10"
        folder.mkdir(parents=True)
        file = folder / f"npu.sbin.{firmware.version}.zst"
        file.touch()
        (folder / ("npu_7.sbin.zst" if firmware.protocol[0] >= 7 else "npu.sbin.zst")).symlink_to(file.name)

    def _add_device(self, number: int) -> Path:
        """Adds an NPU to the bus; returns its folder in sysfs."""
        address = f"0000:c{5 + number}:00.1"
        device = self.root / f"sys/devices/pci0000:00/{address}"
        device.mkdir(parents=True)
        on_bus = self.root / "sys/bus/pci/devices" / address
        on_bus.symlink_to(os.path.relpath(device, on_bus.parent))
        _write(device, vendor="0x1022", device="0x17f0", revision="0x10")
        return device

    def _load_driver(self, watchdog: int | None, devices: list[Path]) -> None:
        (self.root / "sys/bus/pci/drivers/amdxdna").mkdir(parents=True)
        parameters = self.root / "sys/module/amdxdna/parameters"
        parameters.mkdir(parents=True)
        if watchdog is not None:
            _write(parameters, tdr_timeout_ms=str(watchdog))
        log = ""
        for number, device in enumerate(devices):
            said = driver_log(self._firmware, self._linux, device.name)
            if self._firmware is not None and not said:
                _write(device, vbnv="NPU Strix", device_type="0", fw_version=self._firmware.version)
                self._start(number, device)
            log += said
        self._say_the_log(log)

    def _say_the_log(self, log: str) -> None:
        """Makes a dmesg that prints this log."""
        (self.root / "kernel_log").write_text(log, encoding="utf-8")
        command = self.root / "bin/dmesg"
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\ncat '{self.root.resolve()}/kernel_log'\n", encoding="utf-8")
        command.chmod(0o755)

    def _start(self, number: int, device: Path) -> None:
        """Adds what sysfs and /dev have of an NPU that the driver has started."""
        accel = device / f"accel/accel{number}"
        accel.mkdir(parents=True)
        for link, target in [
            (self.root / "sys/bus/pci/drivers/amdxdna" / device.name, device),
            (self.root / f"sys/class/accel/accel{number}", accel),
            (accel / "device", device),
        ]:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(target, link.parent))
        node = self.root / f"dev/accel/accel{number}"
        node.parent.mkdir(parents=True, exist_ok=True)
        node.touch()

    def variables(self) -> dict[str, str]:
        """The environment variables of a process on this machine, in addition to those of this process."""
        libraries = debian_xrt.libraries() or Path()
        # A sanitizer's run time (Makefile) comes first; if a C++ run time comes with it, it is the one that XRT needs.
        before = [
            str(libraries / "libstdc++.so.6") if Path(library).name.startswith("libstdc++") else library
            for library in os.environ.get("LD_PRELOAD", "").split()
        ]
        return {
            xrt.ROOT: str(self.root.resolve()),
            xrt.SETTINGS: self._settings,
            TIME_LIMIT: self._time_limit,
            xrt.KERNELS: str(xrt.kernels_of("npu2").resolve()),
            "PATH": os.pathsep.join([str(self.root.resolve() / "bin"), os.environ["PATH"]]),
            "LD_PRELOAD": " ".join([*before, str(xrt.DRIVER.resolve())]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "FLOWNPU_TESTING_DIR": str(BUILT.resolve()),
        }

    def command(self, *arguments: str | Path, without: Iterable[str] = ()) -> list[str]:
        """A command that runs Python with XRT's libraries; `without`: beginnings of names of libraries to hide."""
        loader = None
        if self._ini:
            # XRT looks for its settings beside the program, which is the loader; elsewhere root's may not be.
            (self.root / "xrt.ini").write_text(self._ini, encoding="utf-8")
            loader = Path(shutil.copy(debian_xrt.command([])[0], self.root))
        return debian_xrt.command([sys.executable, *arguments], using=loader, without=without)

    def python(
        self, *arguments: str | Path, without: Iterable[str] = (), timeout: float = 900
    ) -> subprocess.CompletedProcess[str]:
        """Runs Python on this machine."""
        return subprocess.run(
            self.command(*arguments, without=without),
            env=os.environ | self.variables(), cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout,
        )  # fmt: skip

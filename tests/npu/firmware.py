# SPDX-License-Identifier: Apache-2.0
"""A model of Linux's driver amdxdna and an NPU's firmware: whether the driver starts the NPU, and its log if not.

From drivers/accel/amdxdna, for the NPUs of XDNA2 (17f0): aie2_pci.c and npu4_regs.c of Linux 6.19 and 7. The firmware
tells the version of its mailbox's protocol. A driver of Linux 6.19 takes protocol 6 from 6.12 on; one of Linux 7 takes
7 as well. For a version that it does not take, Linux 7 logs only an error number, that of an unknown request.
"""

from dataclasses import dataclass
from errno import EINVAL, ENOENT, EOPNOTSUPP

Protocol = tuple[int, int]
LEAST_OF_6 = 12


@dataclass(frozen=True)
class Firmware:
    """A version of the firmware, as in sysfs, and (major, minor) of its mailbox's protocol, as it tells the driver."""

    version: str
    protocol: Protocol


# Those of linux-firmware when Linux 6.14 brought the driver, and in 2026; and one under development.
FIRST, CURRENT = Firmware("1.0.0.63", (6, 12)), Firmware("1.1.2.64", (7, 2))
DEVELOPED = Firmware("255.0.5.35", (7, 3))


def driver_log(firmware: Firmware | None, linux: str, place: str) -> str:
    """The driver's message if it does not start the NPU at a place on the bus; empty if it starts it.

    Args:
        firmware: that of the NPU; None: there is none.
        linux: the kernel's version, "7.3.4".
        place: "0000:c5:00.1".
    """
    is_7 = int(linux.partition(".")[0]) >= 7
    if firmware is None:
        file = "amdnpu/17f0_10/" + ("" if is_7 else "npu.sbin")
        return _lines(place, [f"aie2_init: failed to request_firmware {file}, ret -{ENOENT}"], ENOENT)
    major, minor = firmware.protocol
    if (major == 6 and minor >= LEAST_OF_6) or (is_7 and major == 7):
        return ""
    why = []
    if not is_7:
        other = f"Incompatible firmware protocol major {major} minor {minor}"
        why = ["aie2_check_protocol: " + ("Firmware minor version smaller than supported" if major == 6 else other)]
    number = EOPNOTSUPP if is_7 else EINVAL
    started = ["aie2_hw_start: firmware is not alive", f"aie2_init: start npu failed, ret -{number}"]
    return _lines(place, [*why, *started], number)


def _lines(place: str, errors: list[str], number: int) -> str:
    said = [f"[drm] *ERROR* {error}" for error in [*errors, f"amdxdna_probe: Hardware init failed, ret -{number}"]]
    said.append(f"probe with driver amdxdna failed with error -{number}")
    return "".join(f"[    5.1] amdxdna {place}: {line}\n" for line in said)

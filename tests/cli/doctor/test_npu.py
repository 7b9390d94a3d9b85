# SPDX-License-Identifier: Apache-2.0
"""`flownpu doctor` on made-up machines: an NPU, its driver, its firmware, and the memory that the driver locks."""

import resource

import pytest

from flownpu.doctor.checks import Check, Host, Status
from flownpu.doctor.npu import MORE_LOCKED_MEMORY, MORE_LOCKED_MEMORY_OF_ROOT, diagnose_npu
from tests.cli.doctor.machines import FORKY, PPA, RELEASES, UPGRADE
from tests.npu.firmware import CURRENT, FIRST, Firmware, driver_log


def test_machine_without_npu_is_noted(machine):
    assert machine.checks() == {"npu": Check("npu", Status.NOTE, "none in this machine; the cpu device is used")}


def test_devices_of_other_vendors_are_no_npu(machine):
    machine.npu(device="0x17f0", vendor="0x8086")
    machine.node(vendor="0x8086")
    assert machine.checks()["npu"].found == "none in this machine; the cpu device is used"


@pytest.mark.parametrize("device", ["17f1", "17f2", "17f3", "1b0a", "1b0b", "1b0c"])
def test_npu_of_later_generation_is_noted(machine, device):
    machine.npu(device=f"0x{device}")
    check = machine.checks()["npu"]
    assert check.status is Status.NOTE
    assert check.found.startswith(f"NPU of a generation after XDNA2 (PCI {device}), for which FlowNPU has no designs")
    machine.driver()
    machine.node(device=f"0x{device}")
    check = machine.checks()["npu"]
    assert check.status is Status.NOTE
    assert "at /dev/accel/accel0, for which FlowNPU has no designs" in check.found


def test_npu_without_loaded_driver_is_bad(machine):
    machine.npu()
    check = machine.checks()["npu"]
    assert check.status is Status.BAD
    assert check.found == "XDNA2 NPU (Strix, Strix Halo, Krackan), but its driver amdxdna is not loaded"
    assert check.remedy == "sudo modprobe amdxdna"


@pytest.mark.parametrize(
    ("release", "remedy"),
    [
        ("bookworm", UPGRADE),
        (
            "trixie",
            "sed -n 's/trixie-updates/trixie-backports/p' /etc/apt/sources.list | sudo tee "
            "/etc/apt/sources.list.d/backports.list && sudo apt update && "
            "sudo apt install -t trixie-backports linux-image-amd64 && sudo reboot",
        ),
        ("forky", "sudo apt install linux-image-amd64 && sudo reboot"),
        ("noble", f"{PPA} amdxdna-dkms && sudo reboot"),
        ("resolute", "sudo apt install linux-generic && sudo reboot"),
        ("arch", "sudo pacman -S linux && sudo reboot"),
    ],
)
def test_kernel_without_driver_is_bad(machine, release, remedy):
    machine.release(RELEASES[release])
    machine.npu()
    machine.file("proc/sys/kernel/osrelease", "6.12.9")
    machine.file("lib/modules/6.12.9/kernel/drivers/accel/ivpu/intel_vpu.ko.xz")
    check = machine.checks()["npu"]
    assert check.status is Status.BAD
    assert "but Linux 6.12.9 of " in check.found
    assert "has no driver amdxdna for it" in check.found
    assert check.remedy == remedy
    machine.file("lib/modules/6.12.9/kernel/drivers/accel/amdxdna/amdxdna.ko.xz")
    assert machine.checks()["npu"].remedy == "sudo modprobe amdxdna"


@pytest.mark.parametrize(
    ("release", "remedy"),
    [
        ("forky", "sudo apt install firmware-amd-graphics && sudo modprobe -r amdxdna && sudo modprobe amdxdna"),
        ("resolute", "sudo apt install linux-firmware && sudo modprobe -r amdxdna && sudo modprobe amdxdna"),
        ("noble", f"{PPA} amdxdna-dkms && sudo reboot"),
    ],
)
def test_driver_without_firmware_is_bad(machine, release, remedy):
    machine.release(RELEASES[release])
    machine.npu(device="0x1502", revision="0x00")
    machine.driver()
    machine.firmware("17f0_11")  # another NPU's
    check = machine.checks()["npu"]
    assert check.status is Status.BAD
    assert check.found == (
        "XDNA NPU (Phoenix, Hawk Point); its driver amdxdna is loaded, and finds no firmware in "
        "/lib/firmware/amdnpu/1502_00"
    )
    assert check.remedy == remedy


@pytest.mark.parametrize(
    ("protocol", "linux", "said"),
    [
        ((7, 2), "6.19.8", "Incompatible firmware protocol major 7 minor 2"),
        ((6, 1), "6.19.8", "Firmware minor version smaller than supported"),
        ((6, 1), "7.3.4", "start npu failed, ret -95"),
        ((5, 8), "7.3.4", "start npu failed, ret -95"),
    ],
)
def test_driver_refusing_firmware_is_bad(machine, protocol, linux, said):
    machine.release(FORKY)
    machine.npu()
    machine.driver()
    machine.firmware(version="1.2.3.4")
    check = machine.checks(log=driver_log(Firmware("1.2.3.4", protocol), linux, "0000:c5:00.1"))["npu"]
    assert check.status is Status.BAD
    assert check.found.endswith(
        "its driver amdxdna does not take the firmware in /lib/firmware/amdnpu/17f0_11 "
        f"(npu.sbin is npu.sbin.1.2.3.4, {said})"
    )
    assert check.remedy == (
        "sudo apt install firmware-amd-graphics && sudo modprobe -r amdxdna && sudo modprobe amdxdna, and if that "
        "changes nothing sudo apt install linux-image-amd64 && sudo reboot"
    )


@pytest.mark.parametrize(("firmware", "linux"), [(FIRST, "6.19.8"), (FIRST, "7.3.4"), (CURRENT, "7.3.4")])
def test_driver_accepting_firmware_logs_nothing(firmware, linux):
    """If the driver logged something, the test before this one would show nothing."""
    assert driver_log(firmware, linux, "0000:c5:00.1") == ""


def test_driver_that_could_not_start_npu_is_bad(machine):
    """The driver's other errors are only in the kernel's log, which users may not read: the remedy is to look there."""
    machine.npu()
    machine.driver()
    machine.firmware()
    check = machine.checks(log="[    5.1] amdxdna 0000:c5:00.1: [drm] *ERROR* aie2_smu_init: Access power failed")[
        "npu"
    ]
    assert check.status is Status.BAD
    assert check.found.endswith("; its driver amdxdna is loaded, and could not start it")
    assert check.remedy == "sudo dmesg | grep amdxdna"


def test_device_without_permission_is_bad(machine):
    machine.ready()
    check = machine.checks(may_use=False)["npu"]
    assert check.status is Status.BAD
    assert check.found.endswith("at /dev/accel/accel0, which this user may not open")
    assert check.remedy.startswith('sudo usermod -aG render "$USER"')


def test_ready_npu_is_good(machine):
    machine.ready()
    machine.xrt()
    checks = machine.checks()
    assert checks["npu"].status is Status.GOOD
    assert checks["npu"].found.endswith(" at /dev/accel/accel0, driver 2.21, firmware 1.0.0.63")
    assert checks["xrt"] == Check("xrt", Status.GOOD, "XRT 2.25 in /usr/lib/x86_64-linux-gnu")
    assert set(checks) == {"npu", "xrt"}


def test_second_npu_is_noted(machine):
    machine.ready()
    machine.node("accel1", device="0x1502")
    host = Host(root=machine.root, may_use=lambda _: True, kernel_log=str)
    checks = list(diagnose_npu(host))
    assert [check.found for check in checks if check.name == "npu"] == [
        "XDNA2 NPU (Strix, Strix Halo, Krackan) at /dev/accel/accel0, driver 2.21, firmware 1.0.0.63",
        "XDNA NPU (Phoenix, Hawk Point) at /dev/accel/accel1, driver 2.21, firmware 1.0.0.63",
    ]
    several = next(check for check in checks if check.name == "npus")
    assert several.status is Status.NOTE
    assert several.found == "2; FlowNPU uses the first that XRT finds"


LIMITED, ROOT, ALL_BUT_IT = 8 << 20, "000001ffffffffff", "000001ffffffbfff"


@pytest.mark.parametrize(
    ("limit", "capabilities", "bad"),
    [
        (LIMITED, "0000000000000000", True),
        (64 << 20, "0000000000000000", False),
        ("unlimited", "0000000000000000", False),
        (LIMITED, ROOT, False),
        (LIMITED, ALL_BUT_IT, True),
    ],
)
def test_locked_memory_below_driver_need_is_bad(machine, limit, capabilities, bad):
    machine.ready()
    machine.lockable(limit, capabilities)
    checks = machine.checks()
    assert ("memory lock" in checks) is bad
    if bad:
        assert checks["memory lock"].found == "8192 KiB may be locked; the NPU's driver locks 64 MiB"
        assert checks["memory lock"].remedy == MORE_LOCKED_MEMORY


def test_iommu_that_is_off_is_bad(machine):
    """The driver's amdxdna_sva_init (amdxdna_pci_drv.c) fails with ENODEV when a program opens the device."""
    machine.ready()
    assert "iommu" not in machine.checks()
    machine.file("proc/cmdline", "BOOT_IMAGE=/vmlinuz-7.0.0 ro amd_iommu=off ttm.pages_limit=1")
    assert machine.checks()["iommu"].remedy.startswith("remove amd_iommu=off from the kernel's command line")


def test_container_root_keeps_memory_lock_limit(machine):
    """The kernel wants the capability in the host's user namespace; the container's root has it only in its own."""
    machine.ready()
    machine.lockable(LIMITED, ROOT, user=0)
    machine.file("proc/self/uid_map", "0 1000 1\n1 100000 65536")
    # limits.conf's lines for everybody (*) do not apply to root.
    assert machine.checks()["memory lock"].remedy == MORE_LOCKED_MEMORY_OF_ROOT


def test_lock_limit_of_process_is_read():
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lines = [line for line in Host().read("proc/self/limits").splitlines() if line.startswith("Max locked memory")]
    assert lines[0].split()[3] == ("unlimited" if soft == resource.RLIM_INFINITY else str(soft))

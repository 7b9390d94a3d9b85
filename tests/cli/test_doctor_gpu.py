# SPDX-License-Identifier: Apache-2.0
"""The checks of `flownpu doctor` for OpenCL and Vulkan, on made-up machines, on PoCL and on lavapipe."""

from types import SimpleNamespace

import pytest

from flownpu.doctor.checks import Host, Status
from flownpu.doctor.opencl import OpenCl, diagnose_opencl, find_opencl
from flownpu.doctor.vulkan import Vulkan, diagnose_vulkan, find_vulkan
from tests.loader_double import Way

APT = "sudo apt install ocl-icd-libopencl1 mesa-opencl-icd"
GPU = SimpleNamespace(title="AMD Radeon 780M (rusticl)", kind="gpu", driver="25.0.7", compute_units=12)
CPU = SimpleNamespace(title="pthread (Portable Computing Language)", kind="cpu", driver="3.0", compute_units=2)


@pytest.fixture
def debian(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "os-release").write_text('ID=debian\nVERSION_CODENAME=trixie\nPRETTY_NAME="Debian 13"\n')
    return Host(root=tmp_path)


@pytest.mark.parametrize(
    ("found", "status", "text", "remedy"),
    [
        (OpenCl("cannot open libOpenCL.so.1"), Status.NOTE, "no loader (libOpenCL.so.1)", APT),
        (OpenCl(), Status.NOTE, "a loader, but no implementation", APT),
        (OpenCl("", ["rusticl"]), Status.NOTE, "rusticl, but no device of it", "export RUSTICL_ENABLE=radeonsi"),
        (OpenCl("", ["PoCL"], [CPU]), Status.NOTE, f"{CPU.title}: a CPU's, which is there to test", APT),
        (OpenCl(failure="clGetDeviceIDs ended with CL_OUT"), Status.BAD, "clGetDeviceIDs ended", "update or remove"),
        (OpenCl("", ["rusticl", "PoCL"], [CPU, GPU]), Status.GOOD, f"{GPU.title}, driver 25.0.7, 12 compute", ""),
        (
            OpenCl("", ["rusticl"], [GPU], stored_type="fp32 (the driver converts 7 of 131072 numbers wrongly)"),
            Status.GOOD,
            f"{GPU.title}, driver 25.0.7, 12 compute units; activations are stored as fp32 (the driver converts 7",
            "",
        ),
    ],
)
def test_missing_opencl_parts_are_distinguished(debian, found, status, text, remedy):
    check = diagnose_opencl(debian, found)
    assert (check.name, check.status) == ("opencl", status)
    assert check.found.startswith(text)
    assert check.remedy.startswith(remedy)
    assert bool(check.remedy) == bool(remedy)


def test_unknown_system_gets_pip_remedy(tmp_path):
    check = diagnose_opencl(Host(root=tmp_path), OpenCl())
    assert check.remedy.startswith("pip install pocl-binary-distribution pyopencl")


def test_gpu_without_permission_is_bad(debian):
    (debian.root / "dev/dri").mkdir(parents=True)
    (debian.root / "dev/dri/renderD128").write_text("")
    host = Host(root=debian.root, may_use=lambda _path: False)
    check = diagnose_opencl(host, OpenCl("", ["rusticl"]))
    assert check.remedy.startswith('sudo usermod -aG render "$USER"')


@pytest.mark.opencl
def test_pocl_is_found(pocl, debian):
    del pocl
    check = diagnose_opencl(debian, find_opencl())
    assert check.status is Status.NOTE
    assert "Portable Computing Language" in check.found
    assert "a CPU's" in check.found


OF_VULKAN = "sudo apt install libvulkan1 mesa-vulkan-drivers"
RADV = SimpleNamespace(title="AMD Radeon 780M (Vulkan, radv)", kind="gpu", driver="Mesa 25.0.7", compute_units=12)
LLVMPIPE = SimpleNamespace(title="llvmpipe (Vulkan, llvmpipe)", kind="cpu", driver="Mesa", compute_units=2)


@pytest.mark.parametrize(
    ("found", "status", "text", "remedy"),
    [
        (Vulkan("expected Vulkan's loader (...)"), Status.NOTE, "no loader (libvulkan.so.1) of 1.3", OF_VULKAN),
        (Vulkan("VK_ERROR_INCOMPATIBLE_DRIVER (-9)"), Status.NOTE, "no driver; the gpu device can use it", OF_VULKAN),
        (Vulkan(), Status.NOTE, "a driver, but no device", OF_VULKAN),
        (Vulkan(devices=[(LLVMPIPE, "")]), Status.NOTE, f"{LLVMPIPE.title}: a CPU's, which is there", OF_VULKAN),
        (Vulkan(devices=[(RADV, "shaderInt8")]), Status.NOTE, f"{RADV.title} without shaderInt8", "update the driver"),
        (Vulkan(failure="vkEnumerate... ended with"), Status.BAD, "vkEnumerate", "update or remove the driver"),
        (Vulkan(devices=[(LLVMPIPE, ""), (RADV, "")]), Status.GOOD, f"{RADV.title}, driver Mesa 25.0.7, 12", ""),
    ],
)
def test_missing_vulkan_parts_are_distinguished(debian, found, status, text, remedy):
    check = diagnose_vulkan(debian, found)
    assert (check.name, check.status) == ("vulkan", status)
    assert check.found.startswith(text)
    assert check.remedy.startswith(remedy)
    assert bool(check.remedy) == bool(remedy)


@pytest.mark.opencl
def test_lavapipe_is_found(vulkan_double, debian):
    """As a CPU; and what it lacks, or a call that fails, with the name."""
    check = diagnose_vulkan(debian, find_vulkan())
    assert check.status is Status.NOTE
    assert "llvmpipe" in check.found
    vulkan_double.pretend("no shaderInt16")
    assert find_vulkan().devices[0][1] == "shaderInt16"
    vulkan_double.inject("vkEnumeratePhysicalDevices", 1, Way.ONCE, -3)
    assert "VK_ERROR_INITIALIZATION_FAILED" in find_vulkan().failure

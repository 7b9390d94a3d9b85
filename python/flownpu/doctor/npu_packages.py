# SPDX-License-Identifier: Apache-2.0
"""The commands that install what an NPU needs (XRT, driver, firmware) and a GPU (OpenCL, Vulkan), on each distribution.

The packages of each release, as of November 2026:

| release | XRT | the driver amdxdna |
|---|---|---|
| Debian 12 and older | 2.13, which knows no NPU | Linux 6.1 has none: the next Debian has both |
| Debian 13 (trixie) | backports: 2.25 | backports (main's 6.12 has none) |
| Debian testing (forky) and unstable | 2.25 | yes |
| Ubuntu 26.04 and newer | universe: 2.21 | yes |
| Ubuntu before that | 2.13; AMD's PPA of Lemonade has 2.25 | the same PPA, as a package for DKMS |
| Arch | xrt, xrt-plugin-amdxdna | yes |

On other distributions both are built from AMD's sources.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

# Debian 12 and newer, and Ubuntu's releases of that age, have both packages.
_OPENCL = "sudo apt install ocl-icd-libopencl1 mesa-opencl-icd"
_VULKAN = "sudo apt install libvulkan1 mesa-vulkan-drivers"
_RUNTIME, _HEADERS = "libxrt-npu2", "libxrt-dev"
# As the README of AMD's repository says; the packages that it makes put XRT into /opt/xilinx/xrt.
_FROM_SOURCE = (
    "git clone --recursive https://github.com/amd/xdna-driver && cd xdna-driver && sudo ./tools/amdxdna_deps.sh && "
    "(cd xrt/build && ./build.sh -npu -opt) && (cd build && ./build.sh -release)"
)
_NEXT_DEBIAN = {"bullseye": "bookworm", "bookworm": "trixie"}
_LEMONADE = "sudo add-apt-repository -y ppa:lemonade-team/stable && sudo apt install"


@dataclass(frozen=True)
class Release:
    """The commands by which a distribution's release installs packages.

    Attributes:
        name: the release's full name: "Debian GNU/Linux 13 (trixie)".
        runtime: XRT with its part for NPUs.
        headers: XRT's headers.
        driver: a kernel with the driver amdxdna.
        firmware: the NPU's firmware, in a version that fits the kernel.
        opencl: OpenCL's loader and Mesa's implementation, for GPUs of AMD and Intel; "": not known for this release.
        vulkan: Vulkan's loader and Mesa's drivers, likewise.
    """

    name: str
    runtime: str
    headers: str
    driver: str
    firmware: str
    opencl: str = ""
    vulkan: str = ""


def release_of(root: Path) -> Release:
    """The installation commands of the system below a folder, from its /etc/os-release; a derivative has its base's."""
    found = _os_release(root)
    name = found.get("PRETTY_NAME", "this system")
    kinds = [found.get("ID", ""), *found.get("ID_LIKE", "").split()]
    # Ubuntu and its derivatives call themselves like Debian.
    if "ubuntu" in kinds:
        codename = found.get("UBUNTU_CODENAME") or found.get("VERSION_CODENAME", "")
        return replace(_ubuntu(name, codename), opencl=_OPENCL, vulkan=_VULKAN)
    if "debian" in kinds:
        codename = found.get("DEBIAN_CODENAME") or found.get("VERSION_CODENAME", "")
        return replace(_debian(name, codename, root), opencl=_OPENCL, vulkan=_VULKAN)
    if "arch" in kinds:
        xrt = "sudo pacman -S xrt xrt-plugin-amdxdna"
        return Release(
            name, xrt, xrt, "sudo pacman -S linux && sudo reboot", "sudo pacman -S linux-firmware",
            vulkan="sudo pacman -S vulkan-icd-loader vulkan-radeon",
        )  # fmt: skip
    return Release(name, *[_FROM_SOURCE] * 4)


def _debian(name: str, codename: str, root: Path) -> Release:
    if codename in _NEXT_DEBIAN:
        change = f"xargs -r sudo sed -i s/{codename}/{_NEXT_DEBIAN[codename]}/g"
        upgrade = f"grep -rl {codename} /etc/apt/sources.list* | {change} && sudo apt update && sudo apt full-upgrade"
        return Release(name, *[upgrade] * 4)
    suite = "trixie-backports" if codename == "trixie" else ""
    return _with_apt(
        name, lambda package: _apt(package, suite, root), "linux-image-amd64", firmware="firmware-amd-graphics"
    )


def _ubuntu(name: str, codename: str) -> Release:
    # Code names follow the alphabet: 25.10 is questing, 26.04 resolute; focal to questing have no XRT for NPUs.
    if "focal" <= codename <= "questing":
        return _with_apt(
            name, lambda package: f"{_LEMONADE} {package}", "amdxdna-dkms", firmware="amdxdna-dkms", is_dkms=True
        )
    return _with_apt(name, lambda package: f"sudo apt install {package}", "linux-generic", firmware="linux-firmware")


def _with_apt(
    name: str, install: Callable[[str], str], kernel: str, *, firmware: str, is_dkms: bool = False
) -> Release:
    # AMD's DKMS package brings its own firmware, which only the driver of that package takes.
    reload = " && sudo reboot" if is_dkms else " && sudo modprobe -r amdxdna && sudo modprobe amdxdna"
    return Release(
        name, install(_RUNTIME), install(_HEADERS), f"{install(kernel)} && sudo reboot", install(firmware) + reload
    )


def _apt(package: str, suite: str, root: Path) -> str:
    """Apt's command; a suite that is not among the machine's sources is added first, from the mirror that they name."""
    if not suite:
        return f"sudo apt install {package}"
    install = f"sudo apt install -t {suite} {package}"
    folder = root / "etc/apt"
    texts = [_read(file) for file in (folder / "sources.list", *sorted(folder.glob("sources.list.d/*")))]
    if any(re.search(rf"^[^#\n]*\b{suite}\b", text, re.MULTILINE) for text in texts):
        return install
    updates = suite.replace("backports", "updates")
    if updates in _read(folder / "sources.list.d/debian.sources"):
        add = f"sudo sed -i 's/{updates}/& {suite}/' /etc/apt/sources.list.d/debian.sources"
    else:
        add = f"sed -n 's/{updates}/{suite}/p' /etc/apt/sources.list | sudo tee /etc/apt/sources.list.d/backports.list"
    return f"{add} && sudo apt update && {install}"


def _os_release(root: Path) -> dict[str, str]:
    pairs = [line.partition("=") for line in _read(root / "etc/os-release").splitlines() if "=" in line]
    return {key.strip(): " ".join(shlex.split(value)) for key, _, value in pairs if not key.startswith("#")}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

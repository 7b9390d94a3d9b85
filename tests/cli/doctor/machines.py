# SPDX-License-Identifier: Apache-2.0
"""Made-up machines: the files that `flownpu doctor` reads, below a folder."""

from flownpu.doctor.checks import Host
from flownpu.doctor.npu import diagnose_npu


class MadeUp:
    """A machine whose /dev, /etc, /lib, /proc, /sys and /usr are below a folder."""

    def __init__(self, root):
        self.root = root
        self.file("proc/self/uid_map", "         0          0 4294967295")

    def file(self, path, text=""):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def npu(self, device="0x17f0", vendor="0x1022", revision="0x11", place="0000:c5:00.1"):
        for name, text in (("vendor", vendor), ("device", device), ("revision", revision)):
            self.file(f"sys/bus/pci/devices/{place}/{name}", text)

    def driver(self):
        self.file("sys/module/amdxdna/version", "2.21")

    def firmware(self, folder="17f0_11", version="1.0.0.63"):
        """Firmware where linux-firmware puts it, and the link that the driver asks for."""
        file = f"lib/firmware/amdnpu/{folder}/npu.sbin.{version}.zst"
        self.file(file)
        (self.root / file).with_name("npu.sbin.zst").symlink_to(f"npu.sbin.{version}.zst")

    def node(self, name="accel0", vendor="0x1022", device="0x17f0"):
        self.file(f"dev/accel/{name}")
        for attribute, text in (("vendor", vendor), ("device", device), ("fw_version", "1.0.0.63")):
            self.file(f"sys/class/accel/{name}/device/{attribute}", text)

    def lockable(self, limit, capabilities="0000000000000000", user=1000):
        self.file("proc/self/limits", f"Max locked memory         {limit}              {limit}              bytes")
        self.file("proc/self/status", f"Name:\tpython\nUid:\t{user}\t{user}\t{user}\t{user}\nCapEff:\t{capabilities}")

    def release(self, text):
        self.file("etc/os-release", text)

    def xrt(self, *libraries, version="2.25.00", folder="usr/lib/x86_64-linux-gnu"):
        for library in libraries or ("coreutil", "core", "driver_xdna"):
            for name in (f"libxrt_{library}.so.2", f"libxrt_{library}.so.{version}"):
                self.file(f"{folder}/{name}")

    def ready(self):
        """An NPU with all it needs except XRT."""
        self.release(FORKY)
        self.npu()
        self.driver()
        self.firmware()
        self.node()

    def checks(self, *, may_use=True, log="", plugin=""):
        host = Host(root=self.root, may_use=lambda _: may_use, kernel_log=lambda: log, load_plugin=lambda: plugin)
        return {check.name: check for check in diagnose_npu(host)}


def debian(codename, number=""):
    return f'PRETTY_NAME="Debian GNU/Linux {number} ({codename})"\nID=debian\nVERSION_CODENAME={codename}'


FORKY = debian("forky")
# Debian unstable calls itself by the next release's name (package base-files).
RELEASES = {
    "bookworm": debian("bookworm", 12),
    "trixie": debian("trixie", 13),
    "forky": FORKY,
    "noble": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble',
    "mint": "ID=linuxmint\nID_LIKE='ubuntu debian'\nVERSION_CODENAME=zara\nUBUNTU_CODENAME=noble",
    "resolute": "ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=resolute",
    "arch": "ID=arch",
    "fedora": "ID=fedora\nVERSION_ID=44",
}
UPGRADE = (
    "grep -rl bookworm /etc/apt/sources.list* | xargs -r sudo sed -i s/bookworm/trixie/g && sudo apt update && "
    "sudo apt full-upgrade"
)
PPA = "sudo add-apt-repository -y ppa:lemonade-team/stable && sudo apt install"

# SPDX-License-Identifier: Apache-2.0
"""xclbins that XRT's own xclbinutil makes from `flownpu build`'s files, read with the same tool.

`make test` gets Debian's (scripts/tools.py). It takes a PDI for plain bytes, so stand-ins replace the compilers.
"""

import json
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from flownpu.aie.artifacts.folder import ArtifactFolder
from flownpu.aie.artifacts.toolchain import Toolchain, ToolchainError, find_toolchain
from flownpu.aie.artifacts.xclbin import KERNEL, MOST_BUFFERS, pack_xclbin
from scripts import tools
from tests.aie.small_programs import chain
from tests.npu import debian_xrt

TOOL = debian_xrt.xclbinutil()
pytestmark = pytest.mark.skipif(TOOL is None, reason=tools.reason("xrt"))
COLUMNS = {"npu1": 4, "npu2": 8}


@pytest.fixture(autouse=True)
def _without_a_sanitizer(monkeypatch):
    """A sanitizer's run time is for this process; xclbinutil has a C library of its own."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)


class Xclbin:
    """The description that xclbinutil gives of a file."""

    def __init__(self, file, folder):
        self._file, self._folder = Path(file).absolute(), folder
        folder.mkdir(exist_ok=True)

    def _run(self, *options):
        command = [TOOL, *options, "--force", "--input", str(self._file)]
        return subprocess.run(command, cwd=self._folder, check=True, capture_output=True, text=True).stdout

    @property
    def info(self):
        return self._run("--info")

    def section(self, name):
        self._run("--dump-section", f"{name}:JSON:section.json")
        return json.loads((self._folder / "section.json").read_text())[name.lower()]

    def kernels(self):
        """By each kernel's name, (name, address qualifier, offset, bytes) of its arguments."""
        self._run("--dump-section", "EMBEDDED_METADATA:RAW:metadata.xml")
        tree = ET.parse(self._folder / "metadata.xml")  # noqa: S314 the tool's own
        return {
            kernel.get("name"): [
                (a.get("name"), int(a.get("addressQualifier")), int(a.get("offset"), 16), int(a.get("size"), 16))
                for a in kernel.iter("arg")
            ]
            for kernel in tree.iter("kernel")
        }

    def memories(self):
        """By argument number, the name of its memory, for arguments that have one."""
        names = [memory["m_tag"] for memory in self.section("MEM_TOPOLOGY")["m_mem_data"]]
        links = self.section("CONNECTIVITY")["m_connection"]
        return {int(link["arg_index"]): names[int(link["mem_data_index"])] for link in links}

    def pdis(self):
        """The PDIs' bytes, in files that xclbinutil writes when it dumps the partition."""
        pdis = self.section("AIE_PARTITION")["PDIs"]
        return [(self._folder / pdi["file_name"]).read_bytes() for pdi in pdis]


def pack(folder, *, buffers, target="npu2", content=b"a PDI"):
    """An xclbin, read back."""
    folder.mkdir(exist_ok=True)
    (folder / "array.pdi").write_bytes(content)
    pack_xclbin(Path(TOOL), folder / "array.pdi", folder / "array.xclbin", target=target, buffers=buffers)
    return Xclbin(folder / "array.xclbin", folder / "dump")


@pytest.mark.parametrize("target", ["npu1", "npu2"])
@pytest.mark.parametrize(("buffers", "declared"), [(1, 5), (5, 5), (6, 6), (MOST_BUFFERS, MOST_BUFFERS)])
def test_kernel_has_argument_for_each_buffer(tmp_path, target, buffers, declared):
    """A command is packed without gaps: opcode, address of the instructions, their number, addresses of the buffers."""
    xclbin = pack(tmp_path, buffers=buffers, target=target)
    arguments = [("opcode", 0, 0, 8), ("instr", 1, 8, 8), ("ninstr", 0, 16, 4)]
    arguments += [(f"bo{place}", 1, 20 + 8 * place, 8) for place in range(declared)]
    assert xclbin.kernels() == {KERNEL: arguments}
    assert xclbin.memories() == {1: "SRAM"} | {3 + place: "HOST" for place in range(declared)}
    partition = xclbin.section("AIE_PARTITION")
    assert partition["partition"] == {"column_width": str(COLUMNS[target]), "start_columns": ["0"]}
    assert xclbin.pdis() == [b"a PDI"]


def test_kernel_has_number_of_partition(tmp_path):
    """The loader finds a kernel's PDI by the kernel's number."""
    xclbin = pack(tmp_path, buffers=5)
    (kernel,) = xclbin.section("IP_LAYOUT")["m_ip_data"]
    assert (kernel["m_name"], kernel["m_type"], kernel["m_subtype"]) == (f"{KERNEL}:MLIRAIE", "IP_PS_KERNEL", "DPU")
    (pdi,) = xclbin.section("AIE_PARTITION")["PDIs"]
    (group,) = pdi["cdo_groups"]
    assert group["dpu_kernel_ids"] == [kernel["m_kernel_id"]]
    assert group["type"] == "PRIMARY"


def test_arrays_are_told_apart(tmp_path):
    """XRT knows an xclbin by its UUID, the driver a PDI by its own."""
    found = [pack(tmp_path / str(place), buffers=5, content=bytes([place])) for place in range(2)]
    uuids = [line.split()[-1] for xclbin in found for line in xclbin.info.splitlines() if "UUID (xclbin)" in line]
    assert len(set(uuids)) == 2
    assert len({xclbin.section("AIE_PARTITION")["PDIs"][0]["uuid"] for xclbin in found}) == 2


def test_buffers_beyond_kernel_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a call with 16 buffers at most, got 17"):
        pack(tmp_path, buffers=MOST_BUFFERS + 1)


def test_xclbinutil_error_is_quoted(tmp_path):
    (tmp_path / "array.pdi").write_bytes(b"a PDI")
    with pytest.raises(ToolchainError, match="xclbinutil ended with exit code"):
        pack_xclbin(Path(TOOL), tmp_path / "array.pdi", tmp_path, target="npu2", buffers=5)


class Compilers(Toolchain):
    """The real xclbinutil, and compilers that write what they are given."""

    def __init__(self):
        super().__init__(Path("aiecc"), Path("peano"), Path(TOOL), dict.fromkeys(("aiecc", "peano", "xclbinutil"), "1"))

    def compile_kernel(self, *arguments):
        arguments[-1].write_bytes(b"object")

    def compile_design(self, mlir, sequences, pdi):
        if pdi:
            pdi.write_bytes(b"a PDI")
        files = [mlir.with_name(sequence) for sequence in sequences]
        for file in files:
            file.write_bytes(b"\1\0\0\0")
        return files


def test_call_with_more_buffers_packs_array_anew(tmp_path):
    """The calls of an array are compiled one after the other, and the one with the most buffers need not be first."""
    few = chain()
    spare = [replace(few.sequence.buffers[0], name=f"spare{place}") for place in range(5)]
    many = replace(few, sequence=replace(few.sequence, buffers=(*few.sequence.buffers, *spare)))
    (tmp_path / "aie").mkdir()
    (tmp_path / "aie" / "scale.cc").write_text("void scale();")
    folder = ArtifactFolder(tmp_path / "out", "npu2", Compilers(), include_root=tmp_path)
    counts = []
    for call in (few, many, few):
        folder.add("example", "array", {f"call{len(call.sequence.buffers)}": call})
        xclbin = Xclbin(folder.path / folder.xclbin("array"), tmp_path / "dump")
        counts.append(len(xclbin.kernels()[KERNEL]) - 3)
        assert xclbin.pdis() == [b"a PDI"]
    assert counts == [5, 7, 7]
    names = [file.name for file in folder.compiled]
    assert (names.count("array.pdi"), names.count("array.xclbin")) == (1, 2)
    again = ArtifactFolder(tmp_path / "out", "npu2", Compilers(), include_root=tmp_path)
    again.add("example", "array", {"call7": many})
    assert again.compiled == []


def test_xclbinutil_is_found_and_its_age_known(tmp_path, monkeypatch):
    monkeypatch.setenv("AIE_XCLBINUTIL", str(TOOL))
    assert "xclbinutil" not in [tool.name for tool in find_toolchain()[1]]
    old = tmp_path / "xclbinutil"
    old.write_text("#!/bin/sh\necho '       XRT Build Version: 2.13.0'\n")
    old.chmod(0o755)
    monkeypatch.setenv("AIE_XCLBINUTIL", str(old))
    (missing,) = [tool for tool in find_toolchain()[1] if tool.name == "xclbinutil"]
    assert str(missing).startswith("xclbinutil was not found (found XRT Build Version: 2.13.0): install the package")

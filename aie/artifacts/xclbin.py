# SPDX-License-Identifier: Apache-2.0
"""Packs the configuration of an array (aiecc's PDI) as an xclbin, with XRT's xclbinutil.

aiecc makes xclbins too, whose kernel has as many arguments as the call that it compiles has buffers (older ones: five,
whatever the call has). An array has several calls, and XRT crashes on a call with more buffers than the kernel has
arguments, so the number is given here: that of the array's call with the most.

What is written are the sections that aiecc writes (tools/aiecc/SidecarFiles.h of mlir-aie); xclbinutil derives the
others from them (which argument is in which memory):

    MEM_TOPOLOGY       the memories that arguments are in: HOST, SRAM
    kernel MLIR_AIE    opcode, instructions (in SRAM), how many they are, the buffers bo0, bo1, ... (in HOST)
    AIE_PARTITION      columns, and the PDI with the kernel that it is for
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flownpu.aie.artifacts.toolchain import expect_file, run_tool
from flownpu.aie.plan.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Mapping

KERNEL = "MLIR_AIE"
"""The kernel's name, by which a session finds it (ops/npu/xrt/dispatch.cc)."""
# kMinHostBOs and kMaxHostBOs of SidecarFiles.h: with fewer the commands of a run list are too short for the firmware;
# more were not tried on NPUs.
FEWEST_BUFFERS, MOST_BUFFERS = 5, 16
_KERNEL_ID = "0x901"
_ADD_KERNEL = "--add-kernel"
# Where the first buffer's address is in a command, after 8 bytes of opcode, 8 of address and 4 of count; 8 for each.
_FIRST_OFFSET, _ADDRESS_BYTES = 0x14, 8


def pack_xclbin(xclbinutil: Path, pdi: Path, xclbin: Path, *, target: str, buffers: int) -> None:
    """Writes an xclbin.

    Args:
        xclbinutil: XRT's tool.
        pdi: the configuration of the whole array.
        xclbin: the file to write; on an error there is none.
        target: npu1 or npu2.
        buffers: the most that a call of the array has; five are declared if it is fewer.

    Raises:
        ToolchainError: xclbinutil failed.
        ValueError: there are more buffers than a kernel may have.
    """
    with tempfile.TemporaryDirectory(prefix=".packing-", dir=xclbin.parent) as name:
        command: list[str | Path] = [xclbinutil]
        for option, content in sections(pdi, target, buffers).items():
            file = Path(name) / f"{len(command)}.json"
            file.write_text(json.dumps(content, indent=1), encoding="utf-8")
            command += [option, file] if option == _ADD_KERNEL else ["--add-replace-section", f"{option}:JSON:{file}"]
        command += ["--force", "--output", xclbin]
        run_tool(command, xclbin.parent)
    expect_file(xclbin, command)


def sections(pdi: Path, target: str, buffers: int) -> Mapping[str, Any]:
    """The input of xclbinutil, as JSON: the sections by their names, the kernel by the option `--add-kernel`.

    Raises:
        ValueError: there are more buffers than a kernel may have.
    """
    if buffers > MOST_BUFFERS:
        raise ValueError(
            f"[xclbin] expected a call with {MOST_BUFFERS} buffers at most, got {buffers}: join some of them, and give "
            "the call parts of one"
        )
    return {
        "MEM_TOPOLOGY": _memories(),
        _ADD_KERNEL: _kernel(max(buffers, FEWEST_BUFFERS)),
        "AIE_PARTITION": _partition(pdi, LIMITS[target].columns),
    }


def _memories() -> dict[str, Any]:
    """Two names for the host's memory; the sizes, 64 and 48 MB, limit nothing."""
    sizes = {"HOST": "0x10000", "SRAM": "0xc000"}
    common = {"m_type": "MEM_DRAM", "m_used": "1", "m_base_address": "0x4000000"}
    memories = [{**common, "m_tag": tag, "m_sizeKB": size} for tag, size in sizes.items()]
    return {"mem_topology": {"m_count": str(len(memories)), "m_mem_data": memories}}


def _kernel(buffers: int) -> dict[str, Any]:
    def scalar(name: str, kind: str, offset: int) -> dict[str, str]:
        return {"name": name, "address-qualifier": "SCALAR", "type": kind, "offset": hex(offset)}

    def pointer(name: str, kind: str, memory: str, offset: int) -> dict[str, str]:
        place = {"memory-connection": memory, "address-qualifier": "GLOBAL"}
        return {"name": name, **place, "type": kind, "offset": hex(offset)}

    arguments = [
        scalar("opcode", "uint64_t", 0),
        pointer("instr", "char *", "SRAM", 8),
        scalar("ninstr", "uint32_t", 16),
        *(pointer(f"bo{place}", "void*", "HOST", _FIRST_OFFSET + _ADDRESS_BYTES * place) for place in range(buffers)),
    ]
    kernel = {
        "name": KERNEL,
        "type": "dpu",
        "extended-data": {"subtype": "DPU", "functional": "0", "dpu_kernel_id": _KERNEL_ID},
        "arguments": arguments,
        "instances": [{"name": "MLIRAIE"}],
    }
    return {"ps-kernels": {"kernels": [kernel]}}


def _partition(pdi: Path, columns: int) -> dict[str, Any]:
    """The PDI, for all columns of an NPU; its UUID follows from its content."""
    group = {"name": "DPU", "type": "PRIMARY", "pdi_id": "0x01"}
    group_of_kernel = {**group, "dpu_kernel_ids": [_KERNEL_ID], "pre_cdo_groups": ["0xC1"]}
    identity = uuid.UUID(bytes=hashlib.sha256(pdi.read_bytes()).digest()[:16], version=4)
    return {
        "aie_partition": {
            "name": "QoS",
            "operations_per_cycle": "2048",
            "inference_fingerprint": "23423",
            "pre_post_fingerprint": "12345",
            "partition": {"column_width": columns, "start_columns": [0]},
            "PDIs": [{"uuid": str(identity), "file_name": str(pdi.absolute()), "cdo_groups": [group_of_kernel]}],
        }
    }

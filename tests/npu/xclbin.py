# SPDX-License-Identifier: Apache-2.0
"""xclbins as aiecc makes them, by XRT's own xclbinutil, with the emulator's words for a configuration."""

from __future__ import annotations

import json
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts import xrt_runtime

if TYPE_CHECKING:
    import numpy as np

__all__ = ["write_xclbin"]

# aiecc's kernel: what to do with the instructions, where they are, how many words; then the host's buffers.
ARGUMENTS = [
    {"name": "opcode", "address-qualifier": "SCALAR", "type": "uint64_t", "offset": "0x00"},
    {
        "name": "instr", "memory-connection": "SRAM", "address-qualifier": "GLOBAL", "type": "char *", "offset": "0x08",
    },
    {"name": "ninstr", "address-qualifier": "SCALAR", "type": "uint32_t", "offset": "0x10"},
]  # fmt: skip
FIRST_BUFFER = 0x14
KERNEL_ID = "0x901"


def _kernels(buffers: int) -> dict[str, Any]:
    hosts = [
        {
            "name": f"bo{number}", "memory-connection": "HOST", "address-qualifier": "GLOBAL", "type": "void*",
            "offset": hex(FIRST_BUFFER + 8 * number),
        }
        for number in range(buffers)
    ]  # fmt: skip
    kernel = {
        "name": "MLIR_AIE", "type": "dpu",
        "extended-data": {"subtype": "DPU", "functional": "0", "dpu_kernel_id": KERNEL_ID},
        "arguments": ARGUMENTS + hosts, "instances": [{"name": "MLIRAIE"}],
    }  # fmt: skip
    return {"ps-kernels": {"kernels": [kernel]}}


def _memories() -> dict[str, Any]:
    data = [
        {"m_type": "MEM_DRAM", "m_used": "1", "m_sizeKB": size, "m_tag": tag, "m_base_address": "0x4000000"}
        for tag, size in (("HOST", "0x10000"), ("SRAM", "0xc000"))
    ]
    return {"mem_topology": {"m_count": str(len(data)), "m_mem_data": data}}


def _partition(columns: int) -> dict[str, Any]:
    group = {
        "name": "DPU", "type": "PRIMARY", "pdi_id": "0x01", "dpu_kernel_ids": [KERNEL_ID], "pre_cdo_groups": ["0xC1"],
    }  # fmt: skip
    pdi = {"uuid": "00000000-0000-0000-0000-000000000000", "file_name": "./array.pdi", "cdo_groups": [group]}
    partition = {
        "name": "QoS", "operations_per_cycle": "2048", "inference_fingerprint": "23423",
        "pre_post_fingerprint": "12345", "partition": {"column_width": columns, "start_columns": [0]}, "PDIs": [pdi],
    }  # fmt: skip
    return {"aie_partition": partition}


def write_xclbin(path: Path, words: np.ndarray, buffers: int, *, columns: int = 8) -> Path:
    """An xclbin whose configuration is an array's words, with their number of bytes before them.

    Args:
        path: the file.
        words: of the emulator, 64 bits each.
        buffers: how many buffers of the host's its kernel takes.
        columns: of its partition.
    """
    content = words.tobytes()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "array.pdi").write_bytes(struct.pack("<Q", len(content)) + content)
        for name, document in [
            ("kernels", _kernels(buffers)),
            ("memories", _memories()),
            ("part", _partition(columns)),
        ]:
            (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
        done = subprocess.run(
            xrt_runtime.command([
                xrt_runtime.xclbinutil() or "", "--add-replace-section", "MEM_TOPOLOGY:JSON:memories.json",
                "--add-kernel", "kernels.json", "--add-replace-section", "AIE_PARTITION:JSON:part.json", "--force",
                "--quiet", "--output", path.resolve(),
            ]),
            cwd=folder, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return path

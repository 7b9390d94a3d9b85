# SPDX-License-Identifier: Apache-2.0
"""xclbins packed as by `flownpu build`, with XRT's own xclbinutil, but the emulator's words as configuration."""

import os
import struct
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np

from flownpu.aie.artifacts import xclbin
from scripts import tools
from tests.npu import debian_xrt


def write_xclbin(path: Path, words: np.ndarray, buffers: int) -> Path:
    """An xclbin whose configuration is an array's words, preceded by their size in bytes (8 bytes, little-endian).

    Args:
        path: the file.
        words: of the emulator, 64 bits each.
        buffers: how many of the host's buffers its kernel takes, exactly; a build has 5 at least.
    """
    tool = debian_xrt.xclbinutil()
    assert tool is not None, tools.reason("xrt")
    content = words.tobytes()
    with tempfile.TemporaryDirectory() as folder:
        pdi = Path(folder) / "array.pdi"
        pdi.write_bytes(struct.pack("<Q", len(content)) + content)
        with patch.object(xclbin, "FEWEST_BUFFERS", buffers), patch.dict(os.environ):
            # The driver's double and a sanitizer's run time are for this process; xclbinutil has its own C library.
            os.environ.pop("LD_PRELOAD", None)
            xclbin.pack_xclbin(tool, pdi, path.absolute(), target="npu2", buffers=buffers)
    return path

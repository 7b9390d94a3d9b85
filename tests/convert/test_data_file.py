# SPDX-License-Identifier: Apache-2.0
"""The external data file: the places and contents of tensors, and the writes."""

import io
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from flownpu.convert.graph.data_file import ALIGNMENT, DataFile

LARGE_PAGE = 2 << 20
# Bytes of each tensor's parts: less than a page, whole large pages, parts across a page's end, several pages at once.
SIZES = [[5], [LARGE_PAGE, LARGE_PAGE], [LARGE_PAGE - ALIGNMENT, 7, 3], [3 * LARGE_PAGE + 1], [1]]


def write(path: Path) -> list[tuple[ir.ExternalTensor, bytes]]:
    """Writes tensors of random bytes; returns each with its bytes."""
    random = np.random.default_rng(0)
    tensors = []
    with DataFile(path) as data:
        for number, sizes in enumerate(SIZES):
            parts = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
            tensor = data.write(f"t{number}", ir.DataType.UINT8, (sum(sizes),), parts)
            tensors.append((tensor, b"".join(part.tobytes() for part in parts)))
    return tensors


def test_tensors_are_where_references_say(tmp_path: Path) -> None:
    tensors = write(tmp_path / "data")
    contents = (tmp_path / "data").read_bytes()
    end = 0
    for tensor, expected in tensors:
        assert tensor.offset is not None
        assert tensor.offset % ALIGNMENT == 0
        assert contents[end : tensor.offset] == bytes(tensor.offset - end), "zeros between tensors"
        end = tensor.offset + len(expected)
        assert contents[tensor.offset : end] == expected
    assert end == len(contents)


def test_strided_parts_are_written_in_order(tmp_path: Path) -> None:
    square = np.arange(9, dtype=np.float32).reshape(3, 3)
    with DataFile(tmp_path / "data") as data:
        data.write("transposed", ir.DataType.FLOAT, (3, 3), [square.T])
    np.testing.assert_array_equal(np.fromfile(tmp_path / "data", np.float32), square.T.reshape(-1))


@pytest.mark.parametrize("dtype", [ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.UINT2], ids=str)
@pytest.mark.parametrize("size", [6, 7])
def test_types_of_less_than_byte_are_packed(dtype: ir.DataType, size: int, tmp_path: Path) -> None:
    numbers = (np.arange(3 * size).reshape(3, size) % 3).astype(np.int8).astype(dtype.numpy())
    with DataFile(tmp_path / "data") as data:
        tensor = data.write("codes", dtype, numbers.shape, [numbers])
    expected = onnx.numpy_helper.from_array(numbers)  # whose raw_data is packed
    assert (tmp_path / "data").read_bytes() == expected.raw_data
    np.testing.assert_array_equal(tensor.numpy(), numbers)


def test_data_file_is_written_by_large_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    class Recorded(io.FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            written.append(len(data))
            return super().write(data)

    monkeypatch.setattr(Path, "open", lambda path, mode: io.BufferedWriter(Recorded(path, mode)))
    write(tmp_path / "data")
    assert len(written) > 1
    assert all(size == LARGE_PAGE for size in written[:-1]), written
    assert sum(written) == (tmp_path / "data").stat().st_size

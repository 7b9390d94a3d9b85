# SPDX-License-Identifier: Apache-2.0
"""`.q4nx` files: safetensors in which quantised weights are wide Q4NX blocks, as FastFlowLM's converter writes them.

A file holds two kinds of tensors, and no metadata:

    int8     [blocks, 5120]   a quantised weight, row of blocks by row of blocks; some models' files keep the grid of
                              blocks instead, [ceil(rows/32), ceil(columns/256), 5120]
    bfloat16 of any shape     everything else: norm weights, biases, the embedding table

A weight's rows and columns are not in the file; they come from the model's configuration. The converter chooses the
scaling and order of tensors for each model: Gemma's `model.embed_tokens.weight` is multiplied by sqrt(hidden size),
Llama's q_proj and k_proj have the rows of each head in the order of the Hugging Face checkpoint, and a tied
`lm_head.weight` is a quantised copy of the embedding. Nothing in a file distinguishes Q4_1 models, which are Q4NX, from
Q4_0 or MXFP4 models, which have signed codes or other blocks of the same size.
"""

from __future__ import annotations

import json
import math
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

# A safetensors file begins with the header's length in 8 bytes, little-endian.
_LENGTH_BYTES = 8
_BYTES = {"I8": 1, "BF16": 2}


class Q4NXFileError(ValueError):
    """A file is not a `.q4nx` file, or is damaged. The text names the file, the tensor and the byte."""


def read(path: Path | str) -> dict[str, NDArray[Any]]:
    """Maps a file's tensors into memory, by name, in the order in which their bytes lie in the file.

    Returns:
        Quantised weights as uint8 [blocks, 5120] or [rows of blocks, columns of blocks, 5120] (see `blocks`), all
        others as bfloat16.

    Raises:
        OSError: The file is missing or cannot be read.
        Q4NXFileError: The file is damaged, or holds tensors that `.q4nx` files do not have.
    """
    path = Path(path)
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"[q4nx_file] expected a .q4nx file, got {path}, which {what}")
    tensors = {}
    try:
        with safe_open(path, framework="np") as file:
            for name in file.offset_keys():
                entry = file.get_slice(name)
                dtype, shape = entry.get_dtype(), entry.get_shape()
                is_quantized = dtype == "I8" and len(shape) in (2, 3) and shape[-1] == q4nx.BLOCK_BYTES
                if not is_quantized and dtype != "BF16":
                    raise Q4NXFileError(
                        f"{path}: tensor {name!r}: expected I8 [..., {q4nx.BLOCK_BYTES}] or BF16, got {dtype} {shape}; "
                        "this is no .q4nx file"
                    )
                tensor = file.get_tensor(name)
                tensors[name] = tensor.view(np.uint8) if is_quantized else tensor
    except SafetensorError as error:
        raise Q4NXFileError(f"{path}: {_explain(path) or error}; copy or convert the file again") from error
    return tensors


def blocks(tensor: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.uint8]:
    """A quantised tensor of a file as the blocks of W[rows, columns], uint8 [ceil(rows/32), ceil(columns/256), 5120].

    Raises:
        ValueError: The number of blocks is not that of the weight, or a scale or minimum is not finite.
    """
    expected = q4nx.blocks_shape(rows, columns)
    flat = (expected[0] * expected[1], q4nx.BLOCK_BYTES)
    if tensor.dtype != np.uint8 or tensor.shape not in (expected, flat):
        raise ValueError(
            f"[q4nx_file] expected uint8 {list(flat)} for {rows} rows and {columns} columns, got {tensor.dtype} "
            f"{list(tensor.shape)}; rows and columns are those of the model's configuration"
        )
    result = tensor.reshape(expected)
    parameters = result[..., : 2 * q4nx.PARAMETER_BYTES]
    # An exponent of all ones (the low 7 bits of a high byte and the top bit of the low byte) is infinity or NaN.
    wrong = ((parameters[..., 1::2] & 0x7F) == 0x7F) & (parameters[..., ::2] >= 0x80)
    if wrong.any():
        row, column, index = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"[q4nx_file] expected finite scales and minima, got one that is not at byte {2 * index} of block "
            f"({row}, {column}); the file is damaged"
        )
    return result


class Entry(NamedTuple):
    """A tensor that is written part by part.

    Attributes:
        dtype: "I8" for blocks, or "BF16".
        shape: [blocks, 5120] for I8, any shape for BF16.
        parts: Called once to get the arrays (uint8 or bfloat16) whose bytes, one after the other, are the tensor's.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[NDArray[Any]]]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * _BYTES[self.dtype]


def write(path: Path | str, tensors: Mapping[str, NDArray[Any]], *, force: bool = False) -> None:
    """Writes a file under a temporary name and renames it, so that `path` is either complete or as it was before.

    Args:
        path: The file to write.
        tensors: By name: blocks, uint8 [rows of blocks, columns of blocks, 5120], which are written as int8 [blocks,
            5120]; and bfloat16 tensors, written as they are.
        force: Whether to overwrite an existing file.

    Raises:
        FileExistsError: The file exists, and `force` was not given.
        OSError: The file cannot be written.
        ValueError: A tensor has another type or shape.
    """
    write_entries(path, {name: _entry(name, tensor) for name, tensor in tensors.items()}, force=force)


def write_entries(path: Path | str, entries: Mapping[str, Entry], *, force: bool = False) -> None:
    """Writes a file as `write` does, from tensors that need not be in memory as a whole.

    BF16 tensors come first, and both kinds are sorted by name: the order of the safetensors library.

    Raises:
        FileExistsError: The file exists, and `force` was not given.
        OSError: The file cannot be written.
    """
    path = Path(path)
    if path.exists() and not force:
        raise FileExistsError(f"[q4nx_file] expected a path that is free, got {path}; give another or use force")
    ordered = sorted(entries.items(), key=lambda item: (-_BYTES[item[1].dtype], item[0]))
    header, end = {}, 0
    for name, entry in ordered:
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [end, end + entry.size]}
        end += entry.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
            for name, entry in ordered:
                written = sum(file.write(part.tobytes()) for part in entry.parts())
                assert written == entry.size, f"{name}: {written} bytes for {entry.dtype} {entry.shape}"
        temporary.replace(path)
    except OSError as error:
        raise OSError(f"[q4nx_file] could not write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _entry(name: str, tensor: NDArray[Any]) -> Entry:
    if tensor.dtype == q4nx.BFLOAT16:
        return Entry("BF16", tensor.shape, lambda: [tensor])
    if tensor.dtype == np.uint8 and tensor.ndim == 3 and tensor.shape[-1] == q4nx.BLOCK_BYTES:
        return Entry("I8", (tensor.shape[0] * tensor.shape[1], q4nx.BLOCK_BYTES), lambda: [tensor])
    raise ValueError(
        f"[q4nx_file] tensor {name!r}: expected wide blocks, uint8 [rows, columns, {q4nx.BLOCK_BYTES}], or bfloat16, "
        f"got {tensor.dtype} {list(tensor.shape)}"
    )


def _explain(path: Path) -> str:
    """The fault of a file that safetensors refused, with tensor and byte; empty if no fault is found."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if _LENGTH_BYTES + length > size:
            return f"byte 0: expected the length of a header, got {length} in a file of {size} bytes"
        header = file.read(length)
    try:
        entries = json.loads(header)
    except UnicodeDecodeError as error:
        return f"byte {_LENGTH_BYTES + error.start}: expected a header in UTF-8"
    except json.JSONDecodeError as error:
        return (
            f"byte {_LENGTH_BYTES + len(error.doc[: error.pos].encode())}: expected a header in JSON, got {error.msg}"
        )
    except (ValueError, RecursionError) as error:
        return f"byte {_LENGTH_BYTES}: expected a header in JSON, got {error}"
    if not isinstance(entries, dict):
        return f"byte {_LENGTH_BYTES}: expected a JSON object of tensors"
    entries.pop("__metadata__", None)
    return _explain_entries(entries, header, size - _LENGTH_BYTES - length)


def _explain_entries(entries: dict[str, Any], header: bytes, data_bytes: int) -> str:
    start = _LENGTH_BYTES + len(header)
    spans = []
    for name, entry in entries.items():
        where = f"tensor {name!r}, byte {_LENGTH_BYTES + max(header.find(json.dumps(name).encode()), 0)}"
        try:
            dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
            # Checks before the multiplication: a text times a large number would fill the memory.
            valid = all(type(number) is int for number in (*shape, first, last)) and dtype in _BYTES
        except (KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            return f"{where}: expected dtype {' or '.join(_BYTES)}, shape and data_offsets, got {entry}"
        size = math.prod(shape) * _BYTES[dtype]
        if last - first != size:
            return f"{where}: expected {size} bytes for {dtype} {shape}, got {last - first}"
        if not 0 <= first <= last <= data_bytes:
            return f"{where}: expected data up to byte {start + last}, the file has {start + data_bytes}"
        spans.append((first, last, name))
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            return f"tensor {name!r}, byte {start + first}: expected its data to begin at byte {start + end}"
        end = last
    return "" if end == data_bytes else f"byte {start + end}: expected the end of the file, got {data_bytes - end} more"

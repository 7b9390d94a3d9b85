# SPDX-License-Identifier: Apache-2.0
"""Checks by the checksums in the manifest that the files of a model folder have not changed."""

import hashlib
import reprlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flownpu.errors import FlowNPUError
from flownpu.model.folder import MANIFEST, read_json

_READ_AT_ONCE = 1 << 22


def sha256(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """The file's SHA-256 in hexadecimal; `advance` is called with the number of bytes of each piece that was read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_READ_AT_ONCE):
            digest.update(piece)
            advance(len(piece))
    return digest.hexdigest()


def tensor_sums(folder: Path) -> dict[str, dict[str, Any]]:
    """The place of each tensor in the folder's external data, and its CRC-32: {name: {file, offset, bytes, crc32}}."""
    import onnx_ir as ir  # noqa: PLC0415 an optional dependency, needed here only

    sums = {}
    graphs = [ir.load(path).graph for path in sorted(folder.glob("*.onnx"))]
    for name, value in (item for graph in graphs for item in graph.initializers.items()):
        tensor = value.const_value
        # Two graphs may share a tensor: the embedding's graph looks words up in the LM head's weight.
        if isinstance(tensor, ir.ExternalTensor) and name not in sums:
            offset, length = tensor.offset or 0, tensor.length or tensor.nbytes
            file = str(tensor.location)
            crc32 = _crc32(folder / file, offset, length)
            sums[name] = {"file": file, "offset": offset, "bytes": length, "crc32": crc32}
    return sums


def damage(folder: Path, advance: Callable[[int], None] = lambda _: None) -> list[str]:
    """The faults of the folder's files, a line for each file or tensor; empty if they are as written.

    Reads all files; `advance` is called with the number of bytes of each piece that was read.

    Raises:
        FlowNPUError: the folder has no manifest to compare with.
    """
    if not (folder / MANIFEST).is_file():
        raise FlowNPUError(f"{folder} holds no {MANIFEST}, whose sums its files are compared with: convert it again")
    manifest = read_json(folder / MANIFEST)
    return list(_differences(folder, manifest, advance))


def check_sizes(folder: Path) -> None:
    """Looks for truncated weight files by their sizes alone, which takes no time; needs the folder's manifest.

    A folder without a manifest is not checked.

    Raises:
        FlowNPUError: a file with weights is missing, or shorter than the manifest says.
    """
    if not (folder / MANIFEST).is_file():
        return
    manifest = read_json(folder / MANIFEST)
    holders = {item["file"] for item in files_of(manifest, folder / MANIFEST, "file", part="tensors").values()}
    for name, expected in files_of(manifest, folder / MANIFEST, "bytes").items():
        if name not in holders:
            continue
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None or size < expected["bytes"]:
            raise FlowNPUError(
                f"{folder / name}: expected {expected['bytes']} bytes, which hold the model's weights, and "
                f"{'it is missing' if size is None else f'it has {size}'}: copy the folder again, or convert it again"
            )


def files_of(section: dict[str, Any], manifest: Path, *keys: str, part: str = "files") -> dict[str, dict[str, Any]]:
    """The entries of a manifest's "files" (or "tensors") by name, each checked to have `keys`.

    Args:
        section: the manifest's contents.
        manifest: its path, for errors.
        keys: names of values: "bytes", "offset" and "crc32" are integers, others texts.
        part: "files" or "tensors".

    Raises:
        FlowNPUError: an entry lacks a key, or has a value of another type.
    """
    numbers = {"bytes", "offset", "crc32"}
    found = section.get(part, {})
    items = found.items() if isinstance(found, dict) else [(part, found)]
    for name, item in items:
        values = [item.get(key) if isinstance(item, dict) else None for key in keys]
        kinds = [int if key in numbers else str for key in keys]
        if not all(type(value) is kind for value, kind in zip(values, kinds, strict=True)) or "\0" in name:
            raise FlowNPUError(
                f"{manifest}: expected {', '.join(keys)} of {name!r}, got {reprlib.repr(item)}: convert the model again"
            )
    return dict(items)


def _differences(folder: Path, manifest: dict[str, Any], advance: Callable[[int], None]) -> Iterator[str]:
    tensors = files_of(manifest, folder / MANIFEST, "file", "offset", "bytes", "crc32", part="tensors")
    for name, expected in files_of(manifest, folder / MANIFEST, "bytes", "sha256").items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif (size := path.stat().st_size) != expected["bytes"]:
            yield f"{name} has {size} bytes, expected {expected['bytes']}"
        elif sha256(path, advance) != expected["sha256"]:
            yield f"{name} has other contents than were written"
            yield from _damaged_tensors(folder, name, tensors)


def _damaged_tensors(folder: Path, file: str, tensors: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, place in tensors.items():
        if place["file"] != file:
            continue
        if _crc32(folder / file, place["offset"], place["bytes"]) != place["crc32"]:
            end = place["offset"] + place["bytes"]
            yield f"{file}: tensor {name} (bytes {place['offset']} to {end}) is damaged"


def _crc32(path: Path, offset: int, length: int) -> int:
    value = 0
    with path.open("rb") as file:
        file.seek(max(offset, 0))
        while length > 0 and (piece := file.read(min(length, _READ_AT_ONCE))):
            value = zlib.crc32(piece, value)
            length -= len(piece)
    return value

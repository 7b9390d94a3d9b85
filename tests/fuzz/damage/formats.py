# SPDX-License-Identifier: Apache-2.0
"""Damage within a format: values of JSON, numbers and texts of binary headers. Lengths and checksums stay right."""

import dataclasses
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.ep.context import files as context_files
from tests.fuzz.damage.edits import DEEP, damaged_bytes, damaged_tree
from tests.npu.artifacts.folders import INDEX

_LISTS = 100_000  # nested lists for DEEP


@dataclasses.dataclass(frozen=True)
class Format:
    """How a kind of file is parsed and written.

    `read` gives a tree (edits.py), `write` makes a file from a damaged tree and the original file. `typed`: see
    `damaged_tree`. `head`: size of the header in bytes.
    """

    read: Callable[[bytes], Any]
    write: Callable[[Any, bytes], bytes]
    head: Callable[[bytes], int] = len
    typed: bool = True


@st.composite
def damaged_file(draw: DrawFn, name: str, content: bytes) -> tuple[bytes, str]:
    """A damaged file, whose format follows from its name's suffix, and a description of the damage."""
    form = FORMATS.get(name.rpartition(".")[2])
    if form is None:
        return draw(damaged_bytes(content, len(content)))
    if draw(st.integers(0, 2)) == 0:
        return draw(damaged_bytes(content, form.head(content)))
    tree, said = form.read(content), []
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        tree, what = draw(damaged_tree(tree, typed=form.typed))
        said.append(what)
    return form.write(tree, content), "; ".join(said)


# --- JSON -------------------------------------------------------------------------------------------------------------


def _write_json(tree: Any, _: bytes = b"") -> bytes:
    text = json.dumps(tree, ensure_ascii=False)
    return text.replace(f'"{DEEP}"', "[" * _LISTS + "]" * _LISTS).encode("utf-8", "surrogatepass")


# --- safetensors: the header's size as u64, the header in JSON, data --------------------------------------------------


def _safetensors_head(content: bytes) -> int:
    return min(8 + int.from_bytes(content[:8], "little"), len(content))


def _read_safetensors(content: bytes) -> Any:
    return json.loads(content[8 : _safetensors_head(content)])


def _write_safetensors(tree: Any, content: bytes) -> bytes:
    header = _write_json(tree)
    return len(header).to_bytes(8, "little") + header + content[_safetensors_head(content) :]


# --- GGUF (convert/gguf/file.py) --------------------------------------------------------------------------------------

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


def _gguf_head(content: bytes) -> int:
    _, end = _parse_gguf(content)
    return end


def _read_gguf(content: bytes) -> Any:
    tree, _ = _parse_gguf(content)
    return tree


def _parse_gguf(content: bytes) -> tuple[Any, int]:
    """The tree, and where the tensors' bytes begin."""
    at = 4

    def number(kind: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(f"<{kind}", content, at)
        at += struct.calcsize(f"<{kind}")
        return value

    def text() -> bytes:
        nonlocal at
        size = number("Q")
        at += size
        return content[at - size : at]

    def value(kind: int) -> Any:
        if kind == _TEXT:
            return text()
        if kind == _ARRAY:
            element = number("I")
            return {"element": element, "values": [value(element) for _ in range(number("Q"))]}
        return number(_NUMBERS[kind])

    version, tensors, pairs = number("I"), number("Q"), number("Q")
    metadata = []
    for _ in range(pairs):
        key, kind = text(), number("I")
        metadata.append({"key": key, "type": kind, "value": value(kind)})
    described = [
        {"name": text(), "dims": [number("Q") for _ in range(number("I"))], "type": number("I"), "offset": number("Q")}
        for _ in range(tensors)
    ]
    return {"version": version, "pairs": metadata, "tensors": described}, at + -at % 32


def _write_gguf(tree: Any, content: bytes) -> bytes:
    def text(value: bytes) -> bytes:
        return _packed("Q", len(value)) + value

    def value(kind: int, held: Any) -> bytes:
        if isinstance(held, dict):
            element = held["element"]
            values = b"".join(value(element, item) for item in held["values"])
            return _packed("I", element) + _packed("Q", len(held["values"])) + values
        return text(held) if isinstance(held, bytes) else _packed(_NUMBERS.get(kind, "I"), held)

    out = (
        b"GGUF" + _packed("I", tree["version"]) + _packed("Q", len(tree["tensors"])) + _packed("Q", len(tree["pairs"]))
    )
    for pair in tree["pairs"]:
        out += text(pair["key"]) + _packed("I", pair["type"]) + value(pair["type"], pair["value"])
    for tensor in tree["tensors"]:
        out += text(tensor["name"]) + _packed("I", len(tensor["dims"]))
        out += b"".join(_packed("Q", dim) for dim in tensor["dims"])
        out += _packed("I", tensor["type"]) + _packed("Q", tensor["offset"])
    return out + bytes(-len(out) % 32) + content[_gguf_head(content) :]


def _packed(kind: str, value: Any) -> bytes:
    """Any number in the bytes of its type; integers wrap around."""
    if kind in "fd":
        try:
            return struct.pack(f"<{kind}", value)
        except OverflowError:
            return struct.pack(f"<{kind}", float("inf"))
    if isinstance(value, float):
        value = int(value) if abs(value) < 2**63 else 2**63 - 1
    width = struct.calcsize(f"<{kind}")
    return (int(value) % 256**width).to_bytes(width, "little")


# --- Compiled partitions (ep/context/file.h) --------------------------------------------------------------------------


def _read_context(content: bytes) -> Any:
    return dataclasses.asdict(context_files.read(content))


def _write_context(tree: Any, _: bytes) -> bytes:
    kinds = {"attributes": context_files.Attribute, "inputs": context_files.Value, "outputs": context_files.Value}
    kinds["packed"] = context_files.Packed
    nodes = [
        context_files.Node(**{**node, **{key: [kind(**item) for item in node[key]] for key, kind in kinds.items()}})
        for node in tree["nodes"]
    ]
    return context_files.write(context_files.ContextFile(**{**tree, "nodes": nodes}))


# --- Words (aie/words/writer.py): magic, version, kind, checksum of what follows ------------------------------------


def _read_words(content: bytes) -> Any:
    return np.frombuffer(content, "<i8").tolist()


def _write_words(tree: Any, _: bytes) -> bytes:
    return seal_words(b"".join((word % 2**64).to_bytes(8, "little") for word in tree))


def seal_words(words: bytes) -> bytes:
    """The words with their checksum, if they are the index; it has the checksums of all other files."""
    if words[16:24] != INDEX.to_bytes(8, "little"):
        return words
    return words[:24] + zlib.crc32(words[32:]).to_bytes(8, "little") + words[32:]


_SAFETENSORS = Format(_read_safetensors, _write_safetensors, _safetensors_head, typed=False)
FORMATS = {
    "json": Format(json.loads, _write_json, typed=False),
    "safetensors": _SAFETENSORS,
    "q4nx": _SAFETENSORS,
    "gguf": Format(_read_gguf, _write_gguf, _gguf_head),
    "flownpu": Format(
        _read_context, _write_context, lambda content: context_files.HEAD + len(context_files.head_of(content))
    ),
    "words": Format(_read_words, _write_words),
}

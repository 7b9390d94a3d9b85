# SPDX-License-Identifier: Apache-2.0
"""Files of compiled partitions, read and written as the comment of ep/context/file.h describes them."""

import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"FlowNPUC"
VERSION = 4
# Where the head begins.
HEAD = 40
ALIGNMENT = 4096
NO_CONSTANT = -1
# The numbers of the element types (ops/nodes/tensor.h).
TYPES = {"float": 0, "float16": 1, "bfloat16": 2, "int64": 3, "int32": 4, "int8": 5, "uint8": 6, "bool": 7}


@dataclass
class Value:
    name: str | bytes
    type: int
    # None: the rank is not known. An int is written as the number of dimensions, without dimensions after it.
    dims: list[int] | int | None
    constant: int = NO_CONSTANT


@dataclass
class Attribute:
    """`kind` is the number of the type: 0 integer, 1 float, 2 text, 3 list of integers, 4 list of floats.

    A float is given as an integer with its bits.
    """

    key: str | bytes
    kind: int
    value: Any


@dataclass
class Packed:
    name: str | bytes
    constant: int


@dataclass
class Node:
    name: str | bytes
    op_type: str
    domain: str
    since_version: int
    attributes: list[Attribute]
    tensor_attributes: list[str]
    inputs: list[Value]
    outputs: list[Value]
    packed: list[Packed]


@dataclass
class ContextFile:
    compatibility: str | bytes
    nodes: list[Node]
    blobs: list[bytes] = field(default_factory=list)
    # The attribute `notes` of the model's EPContext node, as a number.
    identity: int = 0

    def values(self) -> list[Value]:
        return [value for node in self.nodes for value in [*node.inputs, *node.outputs]]

    def node(self, op_type: str) -> Node:
        return next(node for node in self.nodes if node.op_type == op_type)


def seal(head: bytes, identity: int, version: int = VERSION) -> bytes:
    """The head, preceded by magic, version, size, identity and checksum."""
    begin = struct.pack("<QQQ", version, len(head), identity % 2**64)
    return MAGIC + begin + struct.pack("<Q", zlib.crc32(begin + head)) + head


def head_of(content: bytes) -> bytes:
    (size,) = struct.unpack_from("<Q", content, 16)
    return content[HEAD : HEAD + size]


def write(file: ContextFile) -> bytes:
    content = bytearray(seal(_head(file), file.identity))
    for blob in file.blobs:
        content += bytes(-len(content) % ALIGNMENT) + blob
    return bytes(content)


def read(content: bytes) -> ContextFile:
    reader = _Reader(head_of(content))
    (identity,) = struct.unpack_from("<Q", content, 24)
    file = ContextFile(reader.text(), reader.list(reader.node), identity=identity)
    at = HEAD + len(reader.head)
    for size in reader.list(reader.number):
        at += -at % ALIGNMENT
        file.blobs.append(content[at : at + size])
        at += size
    assert reader.at == len(reader.head)
    assert at == len(content)
    return file


def _number(value: int) -> bytes:
    return (value % 2**64).to_bytes(8, "little")


def _text(value: str | bytes) -> bytes:
    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return _number(len(raw)) + raw


def _list(items: list[Any], write_item: Any) -> bytes:
    return _number(len(items)) + b"".join(map(write_item, items))


def _value(value: Value) -> bytes:
    dims = value.dims
    shape = (
        _number(0) if dims is None else _number(1) + (_list(dims, _number) if isinstance(dims, list) else _number(dims))
    )
    return _text(value.name) + _number(value.type) + shape + _number(value.constant)


def _attribute(attribute: Attribute) -> bytes:
    """Writes the value by its Python type, whatever its kind says."""
    value = attribute.value
    is_list, is_number = isinstance(value, list), isinstance(value, int)
    written = _list(value, _number) if is_list else _number(value) if is_number else _text(value)
    return _text(attribute.key) + _number(attribute.kind) + written


def _node(node: Node) -> bytes:
    return b"".join(
        [
            *map(_text, [node.name, node.op_type, node.domain]),
            _number(node.since_version),
            _list(node.attributes, _attribute),
            _list(node.tensor_attributes, _text),
            _list(node.inputs, _value),
            _list(node.outputs, _value),
            _list(node.packed, lambda packed: _text(packed.name) + _number(packed.constant)),
        ]
    )


def _head(file: ContextFile) -> bytes:
    return _text(file.compatibility) + _list(file.nodes, _node) + _list(file.blobs, lambda blob: _number(len(blob)))


class _Reader:
    def __init__(self, head: bytes) -> None:
        self.head = head
        self.at = 0

    def number(self) -> int:
        (value,) = struct.unpack_from("<q", self.head, self.at)
        self.at += 8
        return int(value)

    def text(self) -> str:
        size = self.number()
        self.at += size
        return self.head[self.at - size : self.at].decode()

    def list(self, read_item: Any) -> list[Any]:
        return [read_item() for _ in range(self.number())]

    def value(self) -> Value:
        name, kind = self.text(), self.number()
        dims = self.list(self.number) if self.number() else None
        return Value(name, kind, dims, self.number())

    def attribute(self) -> Attribute:
        key, kind = self.text(), self.number()
        value = self.text() if kind == 2 else self.list(self.number) if kind in {3, 4} else self.number()
        return Attribute(key, kind, value)

    def node(self) -> Node:
        return Node(
            self.text(),
            self.text(),
            self.text(),
            self.number(),
            self.list(self.attribute),
            self.list(self.text),
            self.list(self.value),
            self.list(self.value),
            self.list(lambda: Packed(self.text(), self.number())),
        )

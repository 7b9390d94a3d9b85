# SPDX-License-Identifier: Apache-2.0
"""Damages bytes and trees of values: strategies of hypothesis that give a damaged copy and a description."""

import copy
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

# Sizes, offsets and counts that overflow when they are added, multiplied, narrowed or rounded up.
INTEGERS = (
    *(0, 1, -1, 2, 3, 7, 8, 9, 31, 32, 63, 64, 100, 255, 256, 4095, 4096, 65535, 65536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 + 1, 2**39, 2**48, 2**53 + 1, 2**61, 2**62, 2**63 - 1),
    *(-2, -3, -8, -(2**31), -(2**31) - 1, -(2**32), -(2**62), -(2**63)),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", " ", "a", "none", "..", "/", "../x", "a\0b", "é", "\ud800", "x" * 5000, "1", "-1", "true", "model.onnx")
# Values that JSON can hold and a reader may not expect.
VALUES = (None, True, False, [], {}, [[]], [None], {"": None}, [0] * 200, 10**30, -(10**30), "1e5")

# Stands for lists nested deeper than any parser accepts; `formats` writes them.
DEEP = "@deep@"


@st.composite
def damaged_bytes(draw: DrawFn, content: bytes, head: int) -> tuple[bytes, str]:
    """Content damaged at random places, in half of all cases within the first `head` bytes."""
    kind = draw(st.sampled_from(["flip", "number", "cut", "extend", "remove", "repeat", "swap", "fill"]))
    size = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 100, 4096]))
    if not content or kind == "extend":
        return content + b"\x5a" * size, f"extended by {size} bytes"
    end = min(head, len(content)) if draw(st.booleans()) else len(content)
    at = draw(st.integers(0, end - 1))
    stop = min(at + size, len(content))
    if kind == "flip":
        said = f"flipped a bit of byte {at}"
        middle, stop = bytes([content[at] ^ 1 << draw(st.integers(0, 7))]), at + 1
    elif kind == "number":
        value, width = draw(st.sampled_from(INTEGERS)), draw(st.sampled_from([1, 2, 4, 8]))
        said = f"{value} in the {width} bytes at byte {at}"
        middle, stop = (value % 256**width).to_bytes(width, "little"), at + width
    elif kind == "cut":
        middle, stop, said = b"", len(content), f"cut at byte {at}"
    elif kind == "remove":
        middle, said = b"", f"removed {size} bytes at byte {at}"
    elif kind == "repeat":
        middle, said = 2 * content[at:stop], f"repeated {size} bytes at byte {at}"
    elif kind == "swap":
        other = draw(st.integers(0, len(content) - 1))
        middle, said = content[other : other + size], f"{size} bytes of byte {other} at byte {at}"
    else:
        middle, said = draw(st.sampled_from([b"\0", b"\xff"])) * (stop - at), f"filled {size} bytes at byte {at}"
    return content[:at] + middle + content[stop:], said


def paths(tree: Any) -> list[tuple[Any, ...]]:
    """The paths of all places in a tree of dicts and lists, including its root."""
    found: list[tuple[Any, ...]] = [()]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += [(key, *rest) for rest in paths(value)]
    return found


def at_path(tree: Any, path: tuple[Any, ...]) -> Any:
    """The value at a place."""
    for key in path:
        tree = tree[key]
    return tree


@st.composite
def damaged_tree(draw: DrawFn, tree: Any, *, typed: bool) -> tuple[Any, str]:
    """A copy of a tree of dicts, lists and values with one place damaged.

    `typed`: values keep their types, and keys stay, as a binary format demands.
    """
    places = paths(tree)
    path = draw(st.sampled_from(places[1:] if len(places) > 1 else places))
    found = copy.deepcopy(tree)
    if not path:
        return draw(st.sampled_from(VALUES)), "another value for all"
    *above, last = path
    parent, old = at_path(found, tuple(above)), at_path(found, path)
    where = "/".join(map(str, path))
    kinds = ["value", "other", "value", "nudge"]
    if isinstance(parent, list):
        kinds += ["remove", "repeat", "swap"]
    elif not typed:
        kinds += ["remove", "rename"]
    kind = draw(st.sampled_from(kinds))
    if kind == "remove":
        del parent[last]
        return found, f"removed {where}"
    if kind == "rename":
        parent[draw(st.sampled_from(TEXTS))] = parent.pop(last)
        return found, f"renamed {where}"
    if kind == "repeat":
        parent.insert(last, copy.deepcopy(old))
        return found, f"repeated {where}"
    if kind == "swap":
        other = draw(st.integers(0, len(parent) - 1))
        parent[last], parent[other] = parent[other], parent[last]
        return found, f"swapped {where} with {other}"
    value = draw(_another(old, kind, [at_path(tree, place) for place in places[1:]], typed=typed))
    parent[last] = value
    shown = repr(value)
    return found, f"{shown if len(shown) < 60 else shown[:60] + '...'} at {where}"


def _form(value: Any) -> Any:
    """The structure that a value in a binary format and its replacement must share."""
    if isinstance(value, dict):
        return frozenset(value)
    return [_form(item) for item in value[:1]] if isinstance(value, list) else type(value)


def _another(old: Any, kind: str, others: list[Any], *, typed: bool) -> st.SearchStrategy[Any]:
    """A value to replace another: one near it, one from another place, or any of its type or of all types."""
    if kind == "nudge" and isinstance(old, int | float) and not isinstance(old, bool):
        return st.sampled_from([old + 1, old - 1, -old, 2 * old, old * 2**32, old * 1000])
    same = [value for value in others if _form(value) == _form(old)] if typed else others
    if kind == "other" and same:
        return st.sampled_from(same).map(copy.deepcopy)
    if isinstance(old, list | dict) and typed:
        return st.just(type(old)()) if isinstance(old, list) else st.just(old)
    of_type: list[Any] = list(TEXTS if isinstance(old, str | bytes) else FLOATS if isinstance(old, float) else INTEGERS)
    if isinstance(old, bytes):
        of_type = [text.encode("utf-8", "surrogatepass") for text in of_type] + [b"\xff\xfe", b"\xe9"]
    if typed:
        return st.sampled_from(of_type)
    return st.sampled_from([*of_type, *INTEGERS, *FLOATS, *TEXTS, *VALUES, DEEP])

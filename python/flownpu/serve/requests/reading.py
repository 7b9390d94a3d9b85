# SPDX-License-Identifier: Apache-2.0
"""Reads JSON from clients and files: any input becomes a value that can be written as JSON again, or an error."""

import codecs
import json
import math
import sys
from typing import Any, NoReturn

from flownpu.errors import FlowNPUError

DEPTH = 128
"""Most levels of objects and lists: ten times what OpenAI's API allows schemas, and few enough that Python, which stops
at a depth of 1000 calls (sys.getrecursionlimit), can walk and write every document that was read."""

VALUES = 4_000_000
"""Most values of a document, counted by the characters before them: a prompt of a million tokens, or 30 MB of prose,
has less. In memory a value takes some 60 bytes."""
KEYS = 10_000
"""Most keys of an object: twice what OpenAI's API allows in a schema. Each wrong one is an error by itself."""


def read_document(content: bytes) -> Any:
    """The value of a JSON text (RFC 8259); a byte order mark before it is dropped.

    Raises:
        FlowNPUError: it is none; the message continues a sentence that names the text: "line 3 is ...".
    """
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content[:4]:
        raise FlowNPUError("UTF-16: expected UTF-8 (`iconv -f utf-16 -t utf-8` converts it)")
    if sum(map(content.count, (b",", b"[", b"{"))) > VALUES:
        raise FlowNPUError(f"too large: expected {VALUES} values at most")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[max(0, error.start - 20) : error.start].decode(errors="ignore")
        raise FlowNPUError(
            f"not UTF-8: the byte 0x{error.object[error.start]:02x} comes after {before!r} (`iconv -f latin1 -t utf-8` "
            "converts Latin-1)"
        ) from error
    try:
        value = json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise FlowNPUError(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise _too_deep() from error
    except FlowNPUError:
        raise
    except (
        ValueError
    ) as error:  # the only other ValueError: sys.get_int_max_str_digits limits numbers that take long to read
        raise FlowNPUError("not JSON that is read here: an integer has thousands of digits") from error
    _check(value)
    return value


def _refuse(constant: str) -> NoReturn:
    raise FlowNPUError(f"not JSON: {constant} is no number")


def _too_deep() -> FlowNPUError:
    return FlowNPUError(f"nested too deeply: expected {DEPTH} levels of objects and lists at most")


def _check(value: Any) -> None:
    """Refuses values that could not be written again: half a surrogate pair, a number beyond float64, deep nesting."""
    level = [value]
    for _ in range(DEPTH + 1):
        below: list[Any] = []
        for each in level:
            if isinstance(each, str):
                if not each.isascii():
                    _check_characters(each)
            elif isinstance(each, float):
                if math.isinf(each):
                    raise FlowNPUError(f"not JSON that is read here: a number is beyond {sys.float_info.max:.1e}")
            elif isinstance(each, dict):
                if len(each) > KEYS:
                    raise FlowNPUError(f"too large: an object has {len(each)} keys, and {KEYS} are expected at most")
                below += each.keys()
                below += each.values()
            elif isinstance(each, list):
                below += each
        if not below:
            return
        level = below
    raise _too_deep()


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FlowNPUError(
            f"not text: {ascii(text[error.start])[1:-1]} is half of a surrogate pair (a character beyond U+FFFF is "
            "written as two of them)"
        ) from error

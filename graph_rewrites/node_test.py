# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest

from flownpu.graph_rewrites.node import attribute_float, attribute_int


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda node: attribute_int(node, "missing"), "an integer attribute missing, got None"),
        (lambda node: attribute_int(node, "text"), "an integer attribute text, got 'a'"),
        (lambda node: attribute_float(node, "text", 1.0), "a number as attribute text, got 'a'"),
    ],
)
def test_attribute_of_other_type_is_refused(read: Callable[[ir.Node], Any], reason: str) -> None:
    node = ir.node("Damaged", [], {"text": "a", "number": 3}, name="one")
    with pytest.raises(ValueError, match=f"Damaged 'one': expected {reason}"):
        read(node)

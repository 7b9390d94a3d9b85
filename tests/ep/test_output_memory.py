# SPDX-License-Identifier: Apache-2.0
"""Outputs so large that each run allocates them anew are in large pages, if the system has these."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
import pytest

from tests.large_pages import asks_for_large_pages, has_large_pages

if TYPE_CHECKING:
    from tests.ep.conftest import MakeSession


@pytest.mark.skipif(not has_large_pages(), reason="this system has no large pages (transparent_hugepage) to ask for")
def test_large_outputs_are_asked_to_be_in_large_pages(make_session: MakeSession) -> None:
    session = make_session("g (float[N] x) => (float[N] z) { z = Mul(x, x) }", strict=True)
    x = np.arange(9 << 20, dtype=np.float32)  # 36 MiB
    (z,) = session.run_with_ort_values(["z"], {"x": onnxruntime.OrtValue.ortvalue_from_numpy(x)})
    assert asks_for_large_pages(z.data_ptr() + x.nbytes // 2)
    np.testing.assert_array_equal(z.numpy(), x * x)

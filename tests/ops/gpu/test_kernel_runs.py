# SPDX-License-Identifier: Apache-2.0
"""Kernels of the language on a device: types of elements, links, the words of a Q4NX weight."""

import ml_dtypes
import numpy as np
import pytest

from flownpu.ops import q4nx
from tests.ops.device import testing

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

Kernel, Link, Tensor = testing.gpu.Kernel, testing.gpu.Link, testing.gpu.Tensor
TYPES = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def context(pocl):
    del pocl
    return testing.gpu.open()


def bits(array):
    """numpy's exchange protocol knows no bfloat16."""
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


@pytest.mark.parametrize("element", TYPES)
def test_elements_are_rounded_as_they_are_written(context, element):
    """To the nearest, ties to even: as numpy and ml_dtypes round."""
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, -0.0, 3e38, -1e-30, 0.1, np.nan, np.inf], np.float32)
    y = np.zeros(x.size, TYPES[element])
    tensors = [Tensor("x", "float", [9]), Tensor("y", element, [9], written=True)]
    context.run(Kernel("args.y.Write(args.x.Read(group(0)), group(0));", tensors), [x.size, 1, 1], [x, bits(y)])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y.astype(np.float32), x.astype(TYPES[element]).astype(np.float32))
    back = np.zeros(x.size, np.float32)
    tensors = [Tensor("x", element, [9]), Tensor("y", "float", [9], written=True)]
    context.run(Kernel("args.y.Write(args.x.Read(group(0)), group(0));", tensors), [x.size, 1, 1], [bits(y), back])
    np.testing.assert_array_equal(back, y.astype(np.float32))


def test_linked_steps_get_coordinates(context):
    rng = np.random.default_rng(0)
    x, r, b = (rng.integers(-9, 9, shape).astype(np.float32) for shape in ((3, 5), (3, 5), 5))
    y = np.zeros((3, 5), np.float32)
    links = {
        "y": [
            Link("value += args.b.Read(at1);", [Tensor("b", "float", [5])]),
            Link("value *= args.r.Read(at);", [Tensor("r", "float", ["rows", 5])]),
        ]
    }
    tensors = [Tensor("x", "float", ["rows", 5]), Tensor("y", "float", ["rows", 5], written=True)]
    kernel = Kernel("args.y.Write(args.x.Read(group(1), group(0)), group(1), group(0));", tensors, links=links)
    context.run(kernel, [5, 3, 1], [x, y, b, r])
    np.testing.assert_array_equal(y, (x + b) * r)


def test_dots_of_integers_are_exact(context):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-128, 128, (7, 4)).astype(np.int8) for _ in range(2))
    y = np.zeros(7, np.int32)
    tensors = [Tensor("a", "int8", [7, 4]), Tensor("b", "int8", [7, 4]), Tensor("y", "int32", [7], written=True)]
    body = "const int i = group(0); args.y.Write(dot4(args.a.Read4(i, 0), args.b.Read4(i, 0), i), i);"
    context.run(Kernel(body, tensors), [7, 1, 1], [a, b, y])
    np.testing.assert_array_equal(y, (a.astype(int) * b).sum(axis=1) + np.arange(7))


@pytest.mark.parametrize("in_image", [False, True])
@pytest.mark.parametrize("layout", [q4nx.NARROW, q4nx.SYMMETRIC, q4nx.WIDE], ids=["narrow", "symmetric", "wide"])
def test_weight_words_equal_packed_bytes(context, layout, in_image):
    """Every element of a weight of several blocks, by Read, by 16 rows at once and transposed, is the host's."""
    rows, columns = 70, 300
    rng = np.random.default_rng(2)
    scale = rng.uniform(0.5, 1, (rows, 10)).astype(ml_dtypes.bfloat16)
    minimum = (-8 * scale.astype(np.float32)).astype(ml_dtypes.bfloat16)
    if layout.minima:
        minimum = rng.uniform(-1, 1, (rows, 10)).astype(ml_dtypes.bfloat16)
    blocks = q4nx.pack(rng.integers(0, 16, (rows, columns)).astype(np.uint8), scale, minimum, layout)
    expected = q4nx.dequantize(blocks, 96, columns)
    bits_of_groups = layout.groups.bit_length() - 1
    weight = Tensor(
        "w", "q4nx", [rows, columns], group_bits=bits_of_groups, has_minima=layout.minima, in_image=in_image
    )
    tensors = [weight, *(Tensor(name, "float", [96, columns], written=True) for name in ("one", "strip", "byte"))]
    body = """
      const int row = group(1) * 16, k = group(0);
      float strip[16];
      uchar pairs[16];
      vstore16(as_uchar16(args.w.CodePairs(row, k / 2 * 2)), 0, pairs);
      const uint4 quads = transposed(args.w.CodePairs(row, k / 2 * 2));
      for (int octet = 0; octet < 2; ++octet) {
        const int first = row + 8 * octet;
        float scales[8], minima[8];
        vstore8(args.w.Scales(first, k / 32), 0, scales);
        vstore8(args.w.Minima(first, k / 32), 0, minima);
        for (int r = 0; r < 8; ++r) {
          const int code = pairs[k % 2 * 8 + octet * 4 + r / 2] >> (r % 2 * 4) & 15;
          strip[octet * 8 + r] = minima[r] + scales[r] * (float)code;
        }
      }
      for (int r = 0; r < 16; ++r) {
        args.one.Write(args.w.Read(row + r, k), row + r, k);
        args.strip.Write(strip[r], row + r, k);
        // Byte r / 2 % 4 of the four words of two columns: rows 0 to 7 and 8 to 15 of one, then of the other.
        const uint word = r / 2 % 4 == 0 ? quads.x : r / 2 % 4 == 1 ? quads.y : r / 2 % 4 == 2 ? quads.z : quads.w;
        const int code = word >> (k % 2 * 16 + r / 8 * 8 + r % 2 * 4) & 15;
        const float byte = args.w.Minimum(row + r, k / 32) + args.w.Scale(row + r, k / 32) * (float)code;
        args.byte.Write(byte, row + r, k);
      }
    """
    found = [np.zeros((96, columns), np.float32) for _ in range(3)]
    context.run(Kernel(body, tensors), [columns, 6, 1], [blocks, *found])
    for each in found:
        # A product and a sum of numbers of up to 16, which the device may contract.
        np.testing.assert_allclose(each, expected, rtol=0, atol=2 * 16 * 2.0**-24)


def test_launch_with_other_counts_is_refused(context):
    kernel = Kernel("args.y.Write(1.0f, 0);", [Tensor("y", "float", [1], written=True)], parameters=["n"])
    with pytest.raises(RuntimeError, match="expected 1 buffers, 1 parameters and 1 lanes, got 2, 0 and 1"):
        context.run(kernel, [1, 1, 1], [np.zeros(1, np.float32)] * 2)


def test_work_groups_beyond_limit_are_refused(context):
    kernel = Kernel("args.y.Write(1.0f, 0);", [Tensor("y", "float", [1], written=True)], lanes=2 * context.work_group)
    with pytest.raises(RuntimeError, match=r"kernel tried.*(work-groups of at most \d+ items|CL_INVALID|CL_BUILD)"):
        context.run(kernel, [1, 1, 1], [np.zeros(1, np.float32)])

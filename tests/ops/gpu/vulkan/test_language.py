# SPDX-License-Identifier: Apache-2.0
"""Words of the kernel language as SPIR-V: numbers on lavapipe, and texts that are refused."""

import math
import re

import numpy as np
import pytest

from tests.ops.device import testing

pytestmark = pytest.mark.opencl

Kernel, Tensor = testing.gpu.Kernel, testing.gpu.Tensor


@pytest.fixture(scope="module")
def context(lavapipe):
    del lavapipe
    return testing.gpu.open(vulkan=True)


def computed(context, body, *, count, element="float", lanes=1, inputs=()):
    """y, of which the body writes all elements."""
    y = np.zeros(count, np.float32 if element == "float" else np.int32)
    tensors = [Tensor(f"x{i}", "float", [x.size]) for i, x in enumerate(inputs)]
    kernel = Kernel(body, [*tensors, Tensor("y", element, [count], written=True)], lanes=lanes)
    context.run(kernel, [1, 1, 1], [*inputs, y])
    return y


def test_loops_and_branches_compute_as_in_c(context):
    """Nested loops whose step changes, branches, a choice that must not read what it does not choose."""
    body = """
      int sum = 0;
      for (int i = 0; i < 10; i += 3) {
        for (int step = 8; step > 0; step /= 2) {
          if (step == 4) { sum += 100; } else if (i == 9) sum -= 1;
        }
      }
      args.y.Write(sum, 0);
      args.y.Write(sum > 0 ? (sum > 399 ? 2 : 3) : 4, 1);
      const float far = sum < 0 ? args.x0.Read(1 << 30) : 5.0f;
      args.y.Write((int)far, 2);
    """
    assert computed(context, body, count=3, element="int32", inputs=[np.zeros(1, np.float32)]).tolist() == [397, 3, 5]


# Bytes of two words, a table of 16, numbers that are not known before the kernel runs: n = 2, a = -1.
_BEFORE = """
  const int n = lane() + 2;
  const int a = lane() - 1;
  const uint word = (uint)n * 0x40c07f81u;
  const uint4 table = (uint4)(0x83828180u, 0x07060504u, 0x8b8a8988u, 0x0f0e0d0cu);
  const float4 four = (float4)(1.5f, 2.5f, -1.5f, -2.5f);
"""
_WORD = (2 * 0x40C07F81) % 2**32  # 0x8180ff02


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("(int)as_uchar4(word).z", 0x80),
        ("(int)as_char4(word).z", 0x80 - 256),
        ("(int)(as_uint(as_uchar4(word).wzyx) >> 1)", int.from_bytes(_WORD.to_bytes(4, "big"), "little") >> 1),
        ("(int)(as_uint(as_uchar4(word) >> (uchar4)(4)))", 0x08080F00),
        ("(int)(as_uint(as_uchar4(word) & (uchar4)(15)))", 0x01000F02),
        ("(int)as_char4(looked_up(table, (uint)(n + 8) * 0x00010101u)).x", 0x8A - 256),
        ("(int)as_char4(looked_up(table, (uint)(n + 3))).x", 5),
        ("(int)as_char4(looked_up(table, (uint)n)).x", 0x82 - 256),
        ("(int)as_char4(looked_up(table, (uint)(n + 12))).x", 14),
        ("a < 1u ? 1 : 0", 0),  # a becomes a uint
        ("n > 5 && n > 6 || n > 1 ? 1 : 0", 1),
        ("n > 1 || n > 5 && n > 6 ? 1 : 0", 1),
        ("(int)(four * n).x", 3),
        ("(int)(n * four).w", -5),
        ("convert_char_sat_rte(four.z * 100.0f)", -128),
        ("convert_char_sat_rte(four.y)", 2),
        ("(int)fmax(as_float(0x7fc00000u + (uint)n), 3.0f)", 3),
        ("n == 2 ? (a == 0 ? (int)args.x.Read(0) : n == 3 ? (int)args.x.Read(1) : 7) : (int)args.x.Read(0)", 7),
    ],
)
def test_expressions_mean_what_they_mean_in_c(expression, expected, context):
    """Also a function of C, and choices within choices of which some read memory."""
    y = np.zeros(1, np.int32)
    tensors = [Tensor("x", "float", [2]), Tensor("y", "int32", [1], written=True)]
    body = f"{_BEFORE} args.y.Write({expression}, 0);"
    context.run(Kernel(body, tensors, lanes=1), [1, 1, 1], [np.float32([5, 6]), y])
    assert y[0] == expected


def test_largest_work_group_numbers_each_lane(context):
    found = computed(context, "args.y.Write(lane(), lane());", count=256, element="int32", lanes=256)
    np.testing.assert_array_equal(found, np.arange(256))


def test_shared_memory_as_another_type(context):
    """Lanes write floats, and read four at a time what others wrote."""
    body = """
      shared float4 all[args.lanes / 4];
      ((shared float*)all)[lane()] = (float)lane();
      synchronise();
      const float4 four = all[(args.lanes - 1 - lane()) / 4];
      args.y.Write((four.x + four.y) + (four.z + four.w), lane());
    """
    found = computed(context, body, count=64, lanes=64)
    quads = np.arange(64, dtype=np.float32).reshape(16, 4).sum(axis=1)
    np.testing.assert_array_equal(found, np.repeat(quads[::-1], 4))


def test_exp_tanh_and_erf_equal_float64(context):
    """exp, tanh and erf against float64. Vulkan allows exp 3 + 2 |x| units in the last place; the two others come
    from it at values up to 10, or from polynomials that are right to 7e-8 (spirv/dialect.cc)."""
    erf = np.vectorize(math.erf)
    x = np.concatenate([np.linspace(-12, 12, 481), [1e-6, -1e-4, 50, -50]]).astype(np.float32)
    for name, of, bound in (
        ("exp", np.exp, lambda y: (3 + 2 * np.abs(x)) * 2.0**-23 * y),
        ("tanh", np.tanh, lambda y: (3 + 20) * 2.0**-23 + 0 * y),
        ("erf", erf, lambda y: 7e-8 + (3 + 32) * 2.0**-23 + 0 * y),
    ):
        body = f"for (int i = 0; i < {x.size}; ++i) args.y.Write({name}(args.x0.Read(i)), i);"
        expected = of(x.astype(np.float64))
        found = computed(context, body, count=x.size, inputs=[x])
        assert (np.abs(found - expected) <= bound(expected)).all(), name


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("const int n = 3; float a[n + k];", "expected a name that is declared, got 'k'"),
        ("args.y.Write(0.0f, 0) args.y.Write(0.0f, 0);", None),  # a write is a block
        ("float a = ldexp(1.0f, 2);", "expected a function of the kernel language, got ldexp"),
        ("int a = 1.0f % 2.0f;", "expected integers beside %, got floats"),
        ("float4 a = (float4)(1.0f, 2.0f);", "expected 4 components of a vector, got 2"),
        ("float a[2]; a = 1.0f;", "expected '[' behind an array's name"),
        ("if (1 > 0 && args.x.Read(0) > 0.0f) { int b = 0; }", "no read of a tensor on the right of &&"),
        ("float a = 1.0f $ 2.0f;", "expected a word, a number or a sign of the kernel language, got '$'"),
    ],
)
def test_text_outside_kernel_language_is_refused(body, message):
    """With the kernel's name, and the words where it stopped."""
    tensors = [Tensor("x", "float", [1]), Tensor("y", "float", [1], written=True)]
    if message is None:
        assert testing.gpu.spirv(Kernel(body, tensors))
        return
    with pytest.raises(RuntimeError, match=r"\[kernel tried\].*" + re.escape(message)):
        testing.gpu.spirv(Kernel(body, tensors))


# Numbers of both signs, the extremes, and shifts; / and % as C has them: towards 0, with the dividend's sign.
_LEFT = np.array([7, -7, 7, -7, 2**31 - 1, -(2**31), -1, 0, 123456789, -123456789, 5, -(2**31)], np.int32)
_RIGHT = np.array([3, 3, -3, -3, 31, 1, 30, 5, 10007, -10007, 5, 31], np.int32)
_SHIFT = np.array([0, 1, 5, 31, 4, 31, 30, 9, 3, 7, 2, 31], np.int32)


def _quotient(a, b):
    return np.trunc(a.astype(np.float64) / b.astype(np.float64)).astype(np.int64)


@pytest.mark.parametrize("kind", ["int", "uint"])
@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a + b", lambda a, b, _s: a + b),
        ("a - b", lambda a, b, _s: a - b),
        ("a * b", lambda a, b, _s: a * b),
        ("a / b", lambda a, b, _s: _quotient(a, b)),
        ("a % b", lambda a, b, _s: a - _quotient(a, b) * b),
        ("a << s", lambda a, _b, s: a << s),
        ("a >> s", lambda a, _b, s: a >> s),
        ("(a & b) | (a ^ (TYPE)(15))", lambda a, b, _s: (a & b) | (a ^ 15)),
        ("~a", lambda a, _b, _s: ~a),
        ("a < b", lambda a, b, _s: a < b),
        ("a <= b", lambda a, b, _s: a <= b),
        ("a > b", lambda a, b, _s: a > b),
        ("a >= b", lambda a, b, _s: a >= b),
        ("a == b", lambda a, b, _s: a == b),
        ("a != b", lambda a, b, _s: a != b),
        ("min(a, b)", lambda a, b, _s: np.minimum(a, b)),
        ("max(a, b)", lambda a, b, _s: np.maximum(a, b)),
        ("as_int((float)a)", lambda a, _b, _s: a.astype(np.float32).view(np.int32)),
    ],
)
def test_integers_equal_numpy(context, kind, expression, expected):
    """Modulo 2^32, in which numpy has int64 here."""
    count = len(_LEFT)
    names = [Tensor(name, "int32", [count]) for name in ("left", "right", "shift")]
    body = f"""
      for (int i = 0; i < {count}; ++i) {{
        const {kind} a = ({kind})args.left.Read(i);
        const {kind} b = ({kind})args.right.Read(i);
        const {kind} s = ({kind})args.shift.Read(i);
        args.y.Write((int)({expression.replace("TYPE", kind)}), i);
      }}
    """
    found = np.zeros(count, np.int32)
    kernel = Kernel(body, [*names, Tensor("y", "int32", [count], written=True)])
    context.run(kernel, [1, 1, 1], [_LEFT, _RIGHT, _SHIFT, found])
    wide = [
        (values if kind == "int" else values.view(np.uint32)).astype(np.int64) for values in (_LEFT, _RIGHT, _SHIFT)
    ]
    np.testing.assert_array_equal(found, np.asarray(expected(*wide)).astype(np.int64).astype(np.int32))


def test_small_elements_keep_sign_and_place(context):
    """int8, float16 and bfloat16 are read one by one, in pairs of different words, and written beside one another."""
    count = 16
    eighths = np.array([*range(-128, 128, 16)], np.int8)
    halves = np.linspace(-3, 3, count).astype(np.float16)
    tensors = [
        Tensor("c", "int8", [count]), Tensor("h", "float16", [count]), Tensor("d", "int8", [count], written=True),
        Tensor("g", "float16", [count], written=True), Tensor("y", "float", [2, count], written=True),
    ]  # fmt: skip
    body = """
      const int i = lane();
      args.d.Write(args.c.Read(args.lanes - 1 - i), i);
      args.g.Write(args.h.Read(args.lanes - 1 - i), i);
      args.y.Write((float)args.c.Read(i), 0, i);
      args.y.Write(rounded_to_half(args.h.Read(i) / 3.0f), 1, i);
    """
    d, g, y = np.zeros(count, np.int8), np.zeros(count, np.float16), np.zeros((2, count), np.float32)
    context.run(Kernel(body, tensors, lanes=count), [1, 1, 1], [eighths, halves, d, g, y])
    np.testing.assert_array_equal(d, eighths[::-1])
    np.testing.assert_array_equal(g, halves[::-1])
    np.testing.assert_array_equal(y[0], eighths)
    np.testing.assert_array_equal(y[1], (halves.astype(np.float32) / np.float32(3)).astype(np.float16))


def test_rounding_to_half_equals_numpy(context):
    """Ties, the smallest and largest numbers, infinities and NaN."""
    bits = np.arange(0, 2**31, 2**31 // 3001, dtype=np.uint32)
    ties = (np.arange(0x33000000, 0x47800000, 0x01231000, dtype=np.uint32) & 0xFFFFF000).astype(np.uint32)
    x = np.concatenate([bits, bits | 0x80000000, ties, ties + 1]).astype(np.uint32).view(np.float32)
    x = np.concatenate([x, np.float32([65504, 65519.99, 65520, 2**-24, 2**-25, 1.5 * 2**-25, np.inf, -np.inf, np.nan])])
    body = f"for (int i = 0; i < {x.size}; ++i) args.y.Write(rounded_to_half(args.x0.Read(i)), i);"
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(computed(context, body, count=x.size, inputs=[x]), expected)


def _instructions(module):
    """(opcode, operands) of each instruction."""
    words = np.frombuffer(module, np.uint32)
    at = 5  # behind the head
    while at < words.size:
        yield int(words[at] & 0xFFFF), [int(word) for word in words[at + 1 : at + (words[at] >> 16)]]
        at += int(words[at] >> 16)


def test_rules_that_no_validator_checks():
    """Blocks behind addresses are decorated, arrays have the stride of their elements, barriers order shared memory.

    Debian's spirv-val and lavapipe take modules without these; a GPU's compiler need not.
    """
    runtime_array, struct, pointer, decorate, int_type, float_type, constant, barrier = 29, 30, 32, 71, 21, 22, 43, 224
    physical, block, stride = 5349, 2, 6
    vector, load, store, mode, local_size, keeps_zeros_and_nan = 23, 61, 62, 16, 17, 4461
    function, convert, maximum_that_passes_over_nan, rounding, to_nearest_even = 12, 115, 80, 39, 0
    body = """
      shared float a[args.lanes];
      a[lane()] = args.x.Read(lane()) + (float)args.c.Read(lane()) + args.h.Read(lane());
      synchronise();
      args.y.Write(fmax(a[args.lanes - 1 - lane()], 0.0f), lane() + args.number);
      args.g.Write(a[lane()], lane());
    """
    tensors = [Tensor("x", "float", [64]), Tensor("c", "int8", [64]), Tensor("h", "float16", [64])]
    tensors += [Tensor("y", "float", [64], written=True), Tensor("g", "float16", [64], written=True)]
    module = testing.gpu.spirv(Kernel(body, tensors, parameters=["number"], lanes=64))
    found = list(_instructions(module))
    bytes_of = {operands[0]: operands[1] // 8 for op, operands in found if op in (int_type, float_type)}
    blocks = {operands[0] for op, operands in found if op == decorate and operands[1] == block}
    strides = {operands[0]: operands[2] for op, operands in found if op == decorate and operands[1] == stride}
    elements = {operands[0]: operands[1] for op, operands in found if op == runtime_array}
    structs = {operands[0] for op, operands in found if op == struct}
    behind = {operands[2] for op, operands in found if op == pointer and operands[1] == physical} & structs
    numbers = {operands[1]: operands[2] for op, operands in found if op == constant}
    assert behind
    assert behind <= blocks
    assert {array: bytes_of[element] for array, element in elements.items()} == strides
    assert sorted(strides.values()) == [1, 2, 4]
    widths = {operands[0]: operands[2] for op, operands in found if op == vector}
    sizes = bytes_of | {made: 4 * width for made, width in widths.items()}
    stored = {operands[1]: operands[0] for op, operands in found if op in (load, function, convert)}
    aligned = [(operands[0], operands[4]) for op, operands in found if op == load and len(operands) == 5]
    aligned += [(stored[operands[1]], operands[3]) for op, operands in found if op == store and len(operands) == 4]
    assert len(aligned) == 3 + 5 + 1 + 2  # elements read, addresses, the parameter, elements written
    assert all(sizes[of] == alignment for of, alignment in aligned)
    assert [operands[2] for op, operands in found if op == decorate and operands[1] == rounding] == [to_nearest_even]
    assert [operands[3] for op, operands in found if op == function] == [maximum_that_passes_over_nan]
    assert [operands[1:] for op, operands in found if op == mode] == [[local_size, 64, 1, 1], [keeps_zeros_and_nan, 32]]
    (orders,) = [operands for op, operands in found if op == barrier]
    workgroup, acquire_release_of_workgroup = 2, 0x8 | 0x100
    assert [numbers[one] for one in orders] == [workgroup, workgroup, acquire_release_of_workgroup]

# SPDX-License-Identifier: Apache-2.0
"""The language of GPU kernels: the source that its words become, without a device."""

import re

import pytest

from tests.ops.device import testing

Kernel, Link, Tensor = testing.gpu.Kernel, testing.gpu.Link, testing.gpu.Tensor


def source(body, *tensors, **keywords):
    """The kernel, without the dialect's prelude."""
    text = testing.gpu.generate(Kernel(body, list(tensors), **keywords))
    return text[text.index("__kernel") :]


def squeezed(text):
    return re.sub(r"\s+", "", text)


def test_coordinates_become_row_major_index():
    made = source("float a = args.x.Read(i, j + 1, k);", Tensor("x", "float", [2, 3, 5]))
    index = re.search(r"tensor_x\[(.*?)\];", made)
    assert index is not None
    expression = index[1].replace("/", "//")
    places = {eval(expression, {"i": i, "j": j, "k": k}) for i in range(2) for j in range(-1, 2) for k in range(5)}  # noqa: S307
    assert places == set(range(30))


def test_tensor_size_as_parameter_is_generated():
    made = source("float a = args.x.Read(i, j);", Tensor("x", "float", ["rows", "width"]), parameters=["width"])
    assert "const int width" in made
    assert "tensor_x[((i)*width+(j))]" in squeezed(made)


def test_constants_are_written_as_numbers():
    made = source("float a = args.scale * args.n + args.lanes;", constants={"scale": 0.1, "n": -3}, lanes=64)
    number = re.search(r"a = (\S+) \* -3 \+ 64;", made)
    assert number is not None
    assert abs(float.fromhex(number[1].removesuffix("f")) - 0.1) < 2.0**-27  # the nearest float32


def test_nested_read_is_generated():
    made = source(
        "float a = args.x.Read(args.ids.Read(i));", Tensor("x", "float", [9]), Tensor("ids", "int32", [4])
    )  # fmt: skip
    assert "tensor_x[(((int)tensor_ids[(i)]))]" in squeezed(made)


@pytest.mark.parametrize(
    ("element", "read"),
    [
        ("float", "(*(__global const float4*)PLACE)"),
        ("float16", "vloada_half4(0, PLACE)"),
        ("bfloat16", "four_from_bfloat16(*(__global const ushort4*)PLACE)"),
    ],
)
def test_vector_of_four_is_read_at_once(element, read):
    made = source("float4 a = args.x.ReadFloats(i, 4 * j);", Tensor("x", element, [2, 8]))
    assert squeezed(read.replace("PLACE", "(tensor_x + ((i) * 8 + (4 * j)))")) in squeezed(made)


def test_steps_are_linked_into_their_producer():
    made = source(
        "args.y.Write(x * 2, i, j);",
        Tensor("y", "float", [2, 3], written=True),
        links={"y": [Link("value += args.r.Read(at);", [Tensor("r", "float", [2, 3])]), Link("value = -value;")]},
    )
    order = [made.index(text) for text in ("value = (x * 2)", "value += tensor_r[", "value = -value", "tensor_y[")]
    assert order == sorted(order)
    assert "__global const float* restrict tensor_r" in made


def test_names_that_contain_args_are_not_rewritten():
    made = source("my_args.x; struct.args.y; cargs.z;")
    assert "my_args.x; struct.args.y; cargs.z;" in made


READ = Tensor("x", "float", [2, 3])
WEIGHT = Tensor("w", "q4nx", [64, 64])
WRITTEN = Tensor("y", "float", [2], written=True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("args.z.Read(0);", "a tensor 'z'"),
        ("args.n", "a constant or a parameter 'n'"),
        ("args.x.Read(0);", "2 coordinates in args.x.Read, got 1"),
        ("args.y.Write(1.0f);", "1 coordinates in args.y.Write, got 0"),
        ("args.x.Write(1.0f, 0, 0);", "no Write of 'x', which is read"),
        ("args.y.Read(0);", "no Read of 'y', which is written"),
        ("args.x.Read4(0, 0);", "no Read4 of 'x'"),
        ("args.x.ReadFloats(0, 0);", "a multiple of 4 as the last size of 'x' for args.x.ReadFloats"),
        ("args.w.ReadFloats(0, 0);", "no ReadFloats of 'w', a Q4NX weight"),
        ("args.w.Read4(0, 0);", "no Read4 of 'w', a Q4NX weight"),
        ("args.x.Scale(0, 0);", "no Scale of 'x'"),
        ("args.x.Read", r"'\(' after args.x.Read"),
        ("args.x.Read(0, (1);", r"'\)' after args.x.Read"),
    ],
)
def test_mistakes_are_named(body, message):
    with pytest.raises(RuntimeError, match=rf"\[kernel tried\] expected {message}"):
        source(body, READ, WEIGHT, WRITTEN)


def test_weight_in_image_is_read_by_image_functions():
    """Its bytes are read by the image's own functions, not by a pointer. No other tensor may be in an image."""
    body = "args.w.Scales(0, 0) + args.w.Minima(0, 0); args.w.CodePairs(0, 0); args.w.Read(0, 0);"
    weight = Tensor("w", "q4nx", [64, 64], in_image=True)
    made = source(body, weight)
    assert "__read_only image1d_buffer_t tensor_w" in made
    assert "vload" not in made
    assert squeezed(made).count("_of_image(tensor_w,") == 6  # Read has a scale, a minimum and a code
    for other in (
        Tensor("w", "float", [64, 64], in_image=True),
        Tensor("w", "q4nx", [1, 1], written=True, in_image=True),
    ):
        with pytest.raises(RuntimeError, match=r"\[kernel tried\] expected 'w' in memory"):
            source("", other)


def test_link_to_unknown_tensor_is_refused():
    with pytest.raises(RuntimeError, match="a tensor 'z'"):
        source("", READ, links={"z": [Link("value = 0;")]})

# SPDX-License-Identifier: Apache-2.0
"""Compiled models of ORT (ep.context_enable) compute the same, or are refused with a reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.ep.conftest import MakeSession, parse, reference
from tests.ep.context import files as context_files

# Attributes of several types (a tensor too), constants of several types, one that is read twice, an output that is left
# out.
GRAPH = """g (float[N,4] x, int64[2] rows) => (float[2,4] y, float[N,4] n, int32[N,4] c)
<float[4] scale = {1, 2, 3, 4}, int64[2] shape = {-1, 4}> {
    n, , , s = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.001> (x, x, scale)
    z = Mul (n, scale)
    t = Gelu <approximate = "tanh"> (z)
    r0 = Reshape <allowzero = 0> (t, shape)
    sizes = Shape (r0)
    two = ConstantOfShape <value = float[1] {2.0}> (sizes)
    r = Div (r0, two)
    y = Gather <axis = 0> (r, rows)
    c = Cast <to = 6> (s)
}"""
# No device takes Det: the nodes before and after it are two partitions.
SPLIT = """g (float[2,2] x) => (float[2,2] y) {
    a = Add (x, x)  d = Det (a)  e = Mul (a, d)  y = Sub (e, x)
}"""
X = np.array([[1, 2, 3, 4], [-5, 6, 70, 8], [0.5, 0, 1, -1]], np.float32)
FEEDS = {"x": X, "rows": np.array([2, 0])}


def session(ep_devices: list[Any], path: Path, options: dict[str, str], **entries: str) -> onnxruntime.InferenceSession:
    configuration = onnxruntime.SessionOptions()
    for key, value in entries.items():
        configuration.add_session_config_entry(f"ep.context_{key}", value)
    configuration.add_provider_for_devices(ep_devices, options)
    return onnxruntime.InferenceSession(str(path), configuration)


@pytest.fixture
def compiled(ep_devices: list[Any], tmp_path: Path) -> Any:
    """Compiles a graph to `tmp_path / compiled / small_ctx.onnx`."""

    def compile_it(graph: str = GRAPH, **options: str) -> Path:
        source = tmp_path / "small.onnx"
        onnx.save(parse(graph), source)
        target = tmp_path / "compiled" / "small_ctx.onnx"
        target.parent.mkdir()
        session(ep_devices, source, options, enable="1", file_path=str(target))
        source.unlink()  # The compiled model does not need the source.
        return target

    return compile_it


def test_compiled_model_gives_same_bits(compiled: Any, make_session: MakeSession) -> None:
    path = compiled()
    assert sorted(file.name for file in path.parent.iterdir()) == ["small_ctx.0.flownpu", "small_ctx.onnx"]
    model = onnx.load(path)
    assert [(node.domain, node.op_type) for node in model.graph.node] == [("com.microsoft", "EPContext")]
    assert [entry.value for entry in model.metadata_props] == ["flownpu-context 4; cpu"]
    found = make_session(path, strict=True).run(None, FEEDS)
    for ours, expected in zip(found, make_session(GRAPH).run(None, FEEDS), strict=True):
        np.testing.assert_array_equal(ours, expected)  # The same steps on the same numbers.
    np.testing.assert_array_equal(found[2], reference(GRAPH, FEEDS)[2])  # x + x is exact.


def test_partitions_have_files_of_their_own(compiled: Any, make_session: MakeSession) -> None:
    path = compiled(SPLIT, on_unsupported="cpu", claim="all")
    assert len(list(path.parent.glob("*.flownpu"))) == 2
    x = np.array([[1, 2], [3, 5]], np.float32)
    (found,) = make_session(path, {"on_unsupported": "cpu"}).run(None, {"x": x})
    np.testing.assert_array_equal(found, reference(SPLIT, {"x": x})[0])  # Integers: all is exact.


def test_default_name_is_beside_model(ep_devices: list[Any], make_session: MakeSession, tmp_path: Path) -> None:
    onnx.save(parse(GRAPH), tmp_path / "small.onnx")
    session(ep_devices, tmp_path / "small.onnx", {}, enable="1")
    assert sorted(file.name for file in tmp_path.glob("small_ctx*")) == ["small_ctx.0.flownpu", "small_ctx.onnx"]
    make_session(tmp_path / "small_ctx.onnx").run(None, FEEDS)


def test_onnx_runtimes_compiler_writes_same_model(
    ep_devices: list[Any], make_session: MakeSession, tmp_path: Path
) -> None:
    onnx.save(parse(GRAPH), tmp_path / "small.onnx")
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices(ep_devices, {})
    onnxruntime.ModelCompiler(options, str(tmp_path / "small.onnx")).compile_to_file(str(tmp_path / "quick.onnx"))
    assert (tmp_path / "quick.0.flownpu").exists()
    make_session(tmp_path / "quick.onnx", strict=True).run(None, FEEDS)


def test_embedding_is_refused(ep_devices: list[Any], tmp_path: Path) -> None:
    onnx.save(parse(GRAPH), tmp_path / "small.onnx")
    with pytest.raises(Exception, match=r"ep.context_embed_mode = '1' is not supported; expected 0"):
        session(ep_devices, tmp_path / "small.onnx", {}, enable="1", embed_mode="1")
    assert list(tmp_path.iterdir()) == [tmp_path / "small.onnx"]


def test_unwritable_folder_is_refused(ep_devices: list[Any], tmp_path: Path) -> None:
    onnx.save(parse(GRAPH), tmp_path / "small.onnx")
    with pytest.raises(Exception, match="cannot write the compiled partition"):
        session(ep_devices, tmp_path / "small.onnx", {}, enable="1", file_path=str(tmp_path / "no" / "a.onnx"))


@pytest.fixture
def edited(compiled: Any, make_session: MakeSession) -> Any:
    """Compiles the graph, lets `edit` change the content of its file, and makes a session of the result."""

    def edit_it(edit: Callable[[context_files.ContextFile], object]) -> onnxruntime.InferenceSession:
        path = compiled()
        file = path.with_name("small_ctx.0.flownpu")
        content = context_files.read(file.read_bytes())
        assert context_files.write(content) == file.read_bytes()
        edit(content)
        file.write_bytes(context_files.write(content))
        return make_session(path)

    return edit_it


def test_partition_of_other_device_is_refused(edited: Any) -> None:
    with pytest.raises(Exception, match="was made for 'npu', this session is for 'cpu': compile it again"):
        edited(lambda file: setattr(file, "compatibility", "npu"))


def test_missing_partition_is_named(compiled: Any, make_session: MakeSession) -> None:
    path = compiled()
    path.with_name("small_ctx.0.flownpu").unlink()
    with pytest.raises(Exception, match=r"there is no '.*small_ctx\.0\.flownpu', the compiled partition"):
        make_session(path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../small_ctx.0.flownpu", ""])
def test_partition_outside_model_folder_is_refused(compiled: Any, make_session: MakeSession, name: str) -> None:
    path = compiled()
    model = onnx.load(path)
    (attribute,) = (a for a in model.graph.node[0].attribute if a.name == "ep_cache_context")
    attribute.s = name.encode()
    onnx.save(model, path)
    with pytest.raises(Exception, match="expected the name of a file beside the model, got '"):
        make_session(path)


@pytest.mark.parametrize("letter", [b"\xe9", b"\xc3(", b"\xed\xa0\x80", b"\xc1\x81", b"\xf4\x90\x80\x80"])
def test_partition_name_without_utf8_is_refused(edited: Any, letter: bytes) -> None:
    """A cut sequence, a missing continuation, a surrogate, an overlong encoding, a code point above U+10FFFF."""
    with pytest.raises(Exception, match=r"its head is damaged: 'S\\x.* is no UTF-8"):
        edited(lambda file: setattr(file.node("Div"), "name", b"S" + letter))


def test_flipped_bit_of_head_is_refused(compiled: Any, make_session: MakeSession) -> None:
    path = compiled()
    file = path.with_name("small_ctx.0.flownpu")
    content = file.read_bytes()
    head = context_files.HEAD + len(context_files.head_of(content))
    rng = np.random.default_rng(0)
    places = [*range(context_files.HEAD), *rng.integers(context_files.HEAD, head, 100)]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        with pytest.raises(Exception, match=r"small_ctx\.0\.flownpu' cannot be read .*; compile the model again"):
            make_session(path)


def test_truncated_or_longer_files_are_refused(compiled: Any, make_session: MakeSession) -> None:
    path = compiled()
    file = path.with_name("small_ctx.0.flownpu")
    content = file.read_bytes()
    head = context_files.HEAD + len(context_files.head_of(content))
    sizes = [0, 5, 39, *np.random.default_rng(0).integers(context_files.HEAD, head, 20), head, len(content) - 1]
    for cut in [*(content[:size] for size in sizes), content + b"x"]:
        file.write_bytes(cut)
        with pytest.raises(Exception, match=r"FlowNPU.*(cannot be read as a compiled partition|cannot read)"):
            make_session(path)


def test_file_of_other_version_is_refused(compiled: Any, make_session: MakeSession) -> None:
    path = compiled()
    file = path.with_name("small_ctx.0.flownpu")
    content = file.read_bytes()
    file.write_bytes(content[:8] + b"\2" + content[9:])
    with pytest.raises(Exception, match="it is of version 2, expected 4; compile the model again"):
        make_session(path)


def constant(file: context_files.ContextFile) -> context_files.Value:
    return next(value for value in file.values() if value.name == "scale")


def output(file: context_files.ContextFile) -> context_files.Value:
    return file.node("SkipSimplifiedLayerNormalization").outputs[0]


def two_constants_of_a_name(file: context_files.ContextFile) -> None:
    file.node("Mul").inputs[1].constant = len(file.blobs)
    file.blobs.append(bytes(16))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda file: setattr(output(file), "type", 11), "expected an element type of 0 to 10, got 11"),
        (lambda file: setattr(output(file), "dims", [1] * 9), "expected a rank of 0 to 8, got 9"),
        (lambda file: setattr(output(file), "dims", [-2, 4]), "value 'n' has a dimension of -2"),
        (lambda file: setattr(output(file), "dims", [2**31, 2**30]), "value 'n' has a dimension of 1073741824"),
        (lambda file: setattr(output(file), "constant", 0), "output 'n' is a constant"),
        (lambda file: setattr(constant(file), "constant", 99), r"expected one of \d constants, got number 99"),
        (lambda file: setattr(constant(file), "constant", -2), r"expected one of \d constants, got number -2"),
        (lambda file: setattr(constant(file), "dims", [5]), "expected 20 bytes of constant 'scale', got 16"),
        (lambda file: setattr(constant(file), "dims", [-1]), "the constant 'scale' has no name, or a shape"),
        (lambda file: setattr(constant(file), "dims", None), "the constant 'scale' has no name, or a shape"),
        (lambda file: setattr(constant(file), "name", ""), "the constant '' has no name, or a shape"),
        (two_constants_of_a_name, "'scale' is one constant here and another there"),
        (lambda file: setattr(file.node("Mul"), "since_version", 2**32 + 14), "version of an operator of 0 to 32767"),
        (
            lambda file: file.node("Gather").attributes.append(context_files.Attribute("axis", 0, 0)),
            "has two attributes 'axis'",
        ),
        (
            lambda file: file.node("Gather").attributes.append(context_files.Attribute("a", 5, 0)),
            "expected a kind of attribute of 0 to 4",
        ),
        (
            lambda file: file.node("Gather").packed.append(context_files.Packed("p", 99)),
            r"expected one of \d constants, got number 99",
        ),
        (lambda file: file.node("Mul").tensor_attributes.extend("abc"), "fewer inputs than attributes among them"),
        (lambda file: setattr(file.node("Mul").inputs[0], "name", "m"), "reads 'm', which nothing has made by then"),
        (lambda file: file.nodes.reverse(), "which nothing has made by then"),
        (lambda file: file.nodes.append(file.nodes[-1]), "makes 'y', which is there already"),
        (lambda file: file.nodes.pop(), "nothing makes the partition's output 'y'"),
        (lambda file: setattr(file.node("Mul").inputs[0], "type", 4), "'n' is int32 here and float there"),
        (lambda file: setattr(file.nodes[-1].outputs[0], "type", 3), "'y' is int64 here and float there"),
        (lambda file: setattr(file.nodes[0].inputs[0], "type", 3), "'x' is int64 here and float there"),
    ],
)
def test_wrong_file_header_with_right_checksum_is_refused(edited: Any, edit: Any, message: str) -> None:
    with pytest.raises(
        Exception, match=rf"small_ctx\.0\.flownpu' cannot be read .*{message}.*; compile the model again"
    ):
        edited(edit)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda file: file.node("Gelu").inputs.clear(), r"Gelu 't': .*got none"),
        (lambda file: setattr(file.node("Mul"), "op_type", "Mull"), "Mull 'z': .*no ai.onnx::Mull"),
        (lambda file: setattr(file.node("Gather").attributes[0], "value", 2**39), "Gather 'y': .*549755813888"),
    ],
)
def test_nodes_unfit_for_device_are_refused(edited: Any, edit: Any, message: str) -> None:
    with pytest.raises(Exception, match=rf"partition '.*small_ctx\.0\.flownpu': {message}.*; compile the model again"):
        edited(edit)


def test_text_without_utf8_is_not_kept(ep_devices: list[Any], tmp_path: Path) -> None:
    content = parse(GRAPH)
    content.graph.node[1].name = "scaled"
    raw = content.SerializeToString()
    assert raw.count(b"scaled") == 1
    (tmp_path / "small.onnx").write_bytes(raw.replace(b"scaled", b"scal\xe9d"))
    with pytest.raises(Exception, match=r"kept with its texts in UTF-8.*'scal\\xe9d'"):
        session(ep_devices, tmp_path / "small.onnx", {}, enable="1")
    assert [file.name for file in tmp_path.iterdir()] == ["small.onnx"]

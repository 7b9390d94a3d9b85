# SPDX-License-Identifier: Apache-2.0
"""Compiled models: what ORT writes with ep.context_enable gives what the model gave, or says why it cannot."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.ep.conftest import parse, reference

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ep.conftest import MakeSession

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
# No device takes Det: what is before and after it are partitions of their own.
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
        source.unlink()  # What was compiled needs it no more.
        return target

    return compile_it


def test_gives_what_the_model_gave(compiled: Any, make_session: MakeSession) -> None:
    path = compiled()
    assert sorted(file.name for file in path.parent.iterdir()) == ["small_ctx.0.flownpu", "small_ctx.onnx"]
    model = onnx.load(path)
    assert [(node.domain, node.op_type) for node in model.graph.node] == [("com.microsoft", "EPContext")]
    assert [entry.value for entry in model.metadata_props] == ["flownpu-context 1; cpu"]
    found = make_session(path, strict=True).run(None, FEEDS)
    for ours, expected in zip(found, make_session(GRAPH).run(None, FEEDS), strict=True):
        np.testing.assert_array_equal(ours, expected)  # The same steps on the same numbers.
    np.testing.assert_array_equal(found[2], reference(GRAPH, FEEDS)[2])  # x + x is exact.


def test_partitions_have_files_of_their_own(compiled: Any, make_session: MakeSession) -> None:
    path = compiled(SPLIT, on_unsupported="cpu")
    assert len(list(path.parent.glob("*.flownpu"))) == 2
    x = np.array([[1, 2], [3, 5]], np.float32)
    (found,) = make_session(path, {"on_unsupported": "cpu"}).run(None, {"x": x})
    np.testing.assert_array_equal(found, reference(SPLIT, {"x": x})[0])  # Integers: all is exact.


def test_the_default_name_is_beside_the_model(ep_devices: list[Any], make_session: MakeSession, tmp_path: Path) -> None:
    onnx.save(parse(GRAPH), tmp_path / "small.onnx")
    session(ep_devices, tmp_path / "small.onnx", {}, enable="1")
    assert sorted(file.name for file in tmp_path.glob("small_ctx*")) == ["small_ctx.0.flownpu", "small_ctx.onnx"]
    make_session(tmp_path / "small_ctx.onnx").run(None, FEEDS)


def test_onnx_runtimes_compiler_writes_it_too(ep_devices: list[Any], make_session: MakeSession, tmp_path: Path) -> None:
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


def test_a_folder_that_cannot_be_written_is_an_error(ep_devices: list[Any], tmp_path: Path) -> None:
    onnx.save(parse(GRAPH), tmp_path / "small.onnx")
    with pytest.raises(Exception, match="cannot write the compiled partition"):
        session(ep_devices, tmp_path / "small.onnx", {}, enable="1", file_path=str(tmp_path / "no" / "a.onnx"))


def test_another_devices_is_refused_with_both_names(compiled: Any, make_session: MakeSession) -> None:
    path = compiled()
    file = path.with_name("small_ctx.0.flownpu")
    content = file.read_bytes()
    assert content.count(b"\x03\0\0\0\0\0\0\0cpu") == 1
    file.write_bytes(content.replace(b"\x03\0\0\0\0\0\0\0cpu", b"\x03\0\0\0\0\0\0\0npu"))
    with pytest.raises(Exception, match="was made for 'npu', this session is for 'cpu': compile it again"):
        make_session(path)


def test_a_missing_file_is_named(compiled: Any, make_session: MakeSession) -> None:
    path = compiled()
    path.with_name("small_ctx.0.flownpu").unlink()
    with pytest.raises(Exception, match=r"cannot open '.*small_ctx\.0\.flownpu': No such file"):
        make_session(path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../small_ctx.0.flownpu", ""])
def test_only_files_beside_the_model_are_read(compiled: Any, make_session: MakeSession, name: str) -> None:
    path = compiled()
    model = onnx.load(path)
    (attribute,) = (a for a in model.graph.node[0].attribute if a.name == "ep_cache_context")
    attribute.s = name.encode()
    onnx.save(model, path)
    with pytest.raises(Exception, match="expected the name of a file beside the model, got '"):
        make_session(path)


@pytest.mark.parametrize("letter", [b"\xe9", b"\xc3(", b"\xed\xa0\x80", b"\xc1\x81", b"\xf4\x90\x80\x80"])
def test_a_name_that_is_no_utf8_is_refused(compiled: Any, make_session: MakeSession, letter: bytes) -> None:
    """Half a letter, one that does not go on, half a surrogate pair, a letter that is too long, one beyond the last."""
    path = compiled()
    file = path.with_name("small_ctx.0.flownpu")
    content = file.read_bytes()
    at = content.index(b"SkipSimplifiedLayerNormalization")
    file.write_bytes(content[:at] + letter + content[at + len(letter) :])
    with pytest.raises(Exception, match="its head is damaged"):
        make_session(path)


def test_damaged_heads_are_refused(compiled: Any, make_session: MakeSession) -> None:
    """Cut anywhere, or with a byte of the head changed: an error of ours, or numbers; never a crash."""
    path = compiled()
    file = path.with_name("small_ctx.0.flownpu")
    content = file.read_bytes()
    head = 24 + int.from_bytes(content[16:24], "little")
    rng = np.random.default_rng(0)
    for size in [0, 5, 23, *rng.integers(24, head, 20), head]:
        file.write_bytes(content[:size])
        with pytest.raises(Exception, match=r"FlowNPU.*(cannot be read as a compiled partition|cannot read)"):
            make_session(path)
    errors = []
    for place in rng.integers(0, head, 150):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        try:
            make_session(path).run(None, FEEDS)
        except Exception as error:  # noqa: BLE001 (ORT raises several types)
            errors.append(str(error))
    assert [error for error in errors if not re.search(r"FlowNPU|\[\w+ '", error)] == []
    assert len(errors) > 50  # A name of a node, say, may be any.

# SPDX-License-Identifier: Apache-2.0
"""Artifacts in a session of one node on the emulated array: none, another model's, damaged ones, compiled models'."""

import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from flownpu.aie.words.writer import WordWriter
from flownpu.npu.artifacts import build_artifacts
from flownpu.ops import q4nx
from tests.aie.words import words_of
from tests.end_to_end.emulated_operators import (
    ENGINE_AND_GEMM,
    numbers,
    product,
    session_of,
    stems,
    weights,
    write_node,
)


def test_missing_artifacts_leave_operators_on_host(tmp_path: Path, ep_devices: list[Any]) -> None:
    file, feeds = product(tmp_path)
    with pytest.raises(Exception, match="leaves 1 of the model's operators to its host"):
        session_of(file, ep_devices[:1])
    emulated = session_of(file, ep_devices[:1], on_unsupported="cpu")
    assert [left["op_type"] for left in emulated.placement["on_host"]] == ["Q4NXMatMul"]
    assert emulated.run(feeds)[1] == []


def test_artifacts_of_another_model_are_refused(tmp_path: Path, ep_devices: list[Any]) -> None:
    file, _ = product(tmp_path)
    build_artifacts(file)
    blocks = q4nx.pack(*weights(2, 256, 512))
    write_node(file, "Q4NXMatMul", {"X": numbers(1, 3, 512)}, {"W": blocks}, M=256, K=512)
    reason = "expected a program of this model to q4nx_matmul in .*; there is one for a model with inner 256, where"
    with pytest.raises(Exception, match=reason):
        session_of(file, ep_devices[:1])


def changed(file: Path, at: int, to: int | None = None) -> None:
    """Flips a bit of a byte of a file, or gives the byte the value `to`."""
    content = bytearray(file.read_bytes())
    content[at] = content[at] ^ 1 if to is None else to
    file.write_bytes(content)


def cut(file: Path) -> None:
    """Cuts off a file's last word."""
    file.write_bytes(file.read_bytes()[:-8])


def larger_than_the_machine(folder: Path) -> None:
    """Gives the buffer of dequantised weights a petabyte; its record in the index is name, role, bytes, line, one."""
    name = WordWriter()
    name.text(f"panels-{256 * 256 * 2}")
    text = name.finish(0, 0)[4:]
    words = words_of(folder / "index.words").copy()
    starts = [at for at in range(len(words) - len(text)) if np.array_equal(words[at : at + len(text)], text)]
    assert starts
    for start in starts:
        words[start + len(text) + 1] = 1 << 50
    words[3] = zlib.crc32(words[4:].tobytes())
    words.tofile(folder / "index.words")


# The damages of a folder, and the session's messages. The index's second word is its version, and the third marks the
# file as an index.
DAMAGE = {
    "a changed byte of a call": (lambda folder: changed(call_of(folder), -3), r"m256-k256\.words is not the file that"),
    "a call cut short": (lambda folder: cut(call_of(folder)), r"m256-k256\.words is not the file that was built"),
    "a call that is gone": (lambda folder: call_of(folder).unlink(), r"m256-k256\.words cannot be read"),
    "a changed byte of an array": (
        lambda folder: changed(folder / "arrays" / "dequant_engine-bf16.words", 99),
        r"dequant_engine-bf16\.words is not the file that was built",
    ),
    "a changed byte of the index": (lambda folder: changed(folder / "index.words", -3), r"index\.words is damaged"),
    "an index cut short": (lambda folder: cut(folder / "index.words"), r"index\.words (is damaged|ends in the middle)"),
    "an index of before": (
        lambda folder: changed(folder / "index.words", 8, 3), "expected version 6, got version 3: write it again",
    ),
    "of another kind": (
        lambda folder: changed(folder / "index.words", 16, 4), "expected an index of artifacts",
    ),
}  # fmt: skip


def call_of(folder: Path) -> Path:
    """The words of the engine's call."""
    (words,) = folder.glob("calls/dequant_engine*/*.words")
    return words


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_artifacts_are_refused(damage: str, tmp_path: Path, ep_devices: list[Any]) -> None:
    """No session is made: the error says which file is damaged, what is wrong with it, and what builds it."""
    file, _ = product(tmp_path)
    harm, said = DAMAGE[damage]
    harm(build_artifacts(file).folder)
    with pytest.raises(Exception, match=said + f".*; build them again: `flownpu build {tmp_path} --for emulate"):
        session_of(file, ep_devices[:1])


def test_program_beyond_memory_is_refused(tmp_path: Path, ep_devices: list[Any]) -> None:
    """The memory must not be allocated: the system would grant it, and end the process at the first write."""
    file, _ = product(tmp_path)
    larger_than_the_machine(build_artifacts(file).folder)
    said = r"expected programs whose buffers fit the \d+ MB of this machine, got panels-131072 of 1073741824 MB"
    with pytest.raises(Exception, match=said + ".*: build them for a shorter context"):
        session_of(file, ep_devices[:1])


def test_compiled_model_gives_same_bits(tmp_path: Path, ep_devices: list[Any]) -> None:
    """The compiled model keeps the array's constants, gives the same bits, and does not run without the artifacts."""
    file, feeds = product(tmp_path)
    artifacts = build_artifacts(file).folder
    expected, _ = session_of(file, ep_devices[:1]).run(feeds)
    compiled = tmp_path / "compiled.onnx"
    settings = onnxruntime.SessionOptions()
    settings.add_session_config_entry("ep.context_enable", "1")
    settings.add_session_config_entry("ep.context_file_path", str(compiled))
    settings.add_provider_for_devices(
        ep_devices[:1], {"device": "emulate", "npu_threshold": "0", "activations": "bf16"}
    )
    onnxruntime.InferenceSession(str(file), settings)
    found, dispatches = session_of(compiled, ep_devices[:1]).run(feeds)
    assert stems(dispatches) == ENGINE_AND_GEMM
    np.testing.assert_array_equal(found[0], expected[0])
    shutil.rmtree(artifacts)
    with pytest.raises(Exception, match=r"found no index\.words; build them"):
        session_of(compiled, ep_devices[:1], on_unsupported="cpu")

# SPDX-License-Identifier: Apache-2.0
"""The host reads a folder of artifacts, and names missing and damaged files."""

import re
import struct
import zlib

import numpy as np
import pytest

from tests.npu.arrays import npu
from tests.npu.artifacts.folders import CallClass, FolderCall, FolderProgram, FolderRows, family_words, write_folder

Artifacts, DeviceError = npu.Artifacts, npu.DeviceError


def product(rows, n):
    name = f"gemm_{rows}_{n}"
    family = family_words([CallClass([rows, n])], positions=8, name=name)
    return FolderCall("gemm", name, family, [("a", 2 * rows), ("c", 2 * rows * n)], array=1)


CALLS = [FolderCall("rms_norm", "norm", family_words([CallClass([5])])), product(64, 32)]
BUFFERS = [("a", 2, 128, 0, 0), ("c", 2, 4096, 0, 0), ("cache", 1, 64, 0, 0)]
SCALE = struct.unpack("<i", struct.pack("<f", 0.25))[0]


def program(kind="decode", dispatches=None, **changes):
    """A norm, then a product: the host writes two rows into its input and reads four of its result."""
    dispatches = dispatches or [[(0, "norm, here", [])], [(1, "gemm, there", [(0, 0), (1, 0)])]]
    given, made = FolderRows(0, 0, 128, 30, 32), FolderRows(1, 0, 256, 32, 32)
    return FolderProgram(kind, BUFFERS, dispatches, **{"given": given, "made": made} | changes)


def node(**attributes):
    """A partition with the node that a model's layers become; it owns the node, so callers keep it."""
    return npu.Partition([("node", "DecoderLayers", "", attributes, [], [])])


@pytest.fixture
def folder(tmp_path):
    """The artifacts of a model in `tmp_path`."""
    programs = [
        program(attributes={"hidden": [64], "windows": [0, 512]}),
        program(attributes={"hidden": [128], "windows": [0, 512]}),
        program(attributes={"scale": [SCALE], "activation": list(b"geglu")}, kind="encode"),
    ]
    return write_folder(tmp_path / "artifacts" / "emulate", [np.arange(9), np.arange(50_000)], CALLS, programs)


def refused(message):
    return pytest.raises(DeviceError, match=message)


def again(folder, target=" --target npu2"):
    return f"`flownpu build {re.escape(str(folder.parents[1]))} --for emulate{target}`"


def damage(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_index_calls_and_files_are_found(folder):
    artifacts = Artifacts(str(folder))
    assert (artifacts.target, artifacts.emulated, artifacts.identity) == ("npu2", True, "an identity")
    call = artifacts.call(1)
    assert (call.op_type, call.name, call.array) == ("gemm", "gemm_64_32", 1)
    assert call.buffers == [("a", 128), ("c", 2 * 64 * 32)]
    assert artifacts.array_file(call) == str(folder / "arrays" / "array_1.words")
    assert artifacts.family(call).words(7) == [64, 32]


def test_programs_are_found_by_attributes_of_model(folder):
    artifacts = Artifacts(str(folder))
    model = node(hidden=128, windows=[0, 512], scale=0.25, activation="geglu", other=1)
    (found,) = artifacts.programs("decode", model.nodes[0])
    assert found.buffers == [("a", 128), ("c", 4096), ("cache", 64)]
    assert found.dispatches == [[(0, "norm, here")], [(1, "gemm, there")]]
    assert [each.kind for each in artifacts.require("encode", model.nodes[0])] == ["encode"]
    assert artifacts.programs("prefill", model.nodes[0]) == []


@pytest.mark.parametrize(
    ("kind", "attributes", "there"),
    [
        (
            "decode", {"hidden": 32, "windows": [0, 512]},
            "one for a model with hidden 128, where this model has 32, and hidden 64, where this model has 32",
        ),
        ("decode", {"hidden": 64, "windows": [0, 256]}, "windows 0,512, where this model has 0,256"),
        ("decode", {"hidden": 64}, "one for a model with hidden 128, .*, and windows, which the model has not"),
        ("encode", {"scale": 0.5, "activation": "geglu"}, "a model with scale 0.25, where this model has 0.5"),
        ("encode", {"scale": 0.25, "activation": "swiglu"}, "with activation geglu, where this model has swiglu"),
        ("prefill", {}, "none"),
    ],
)  # fmt: skip
def test_missing_program_is_refused_with_nearest(folder, kind, attributes, there):
    model = node(**attributes)
    with refused(
        f"expected a program of this model to {kind} in {folder}; there is .*{there}; build the designs of this model: "
        + again(folder)
    ) as e:
        Artifacts(str(folder)).require(kind, model.nodes[0])
    assert e.value.failure == "artifact"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (program(dispatches=[[(2, "far", [])]]), "expected a number of one of 2 calls, got 2"),
        (program(dispatches=[[]]), "program decode has an empty dispatch"),
        (program(dispatches=[[(1, "gemm", [(0, 0)])]]), "gemm: expected 2 arguments of its call, got 1"),
        (
            program(dispatches=[[(1, "gemm", [(0, 2), (1, 0)])]]),
            "gemm: expected a part of the 128 bytes of a, got 128 from 2 on",
        ),
        (program(dispatches=[[(1, "gemm", [(3, 0), (1, 0)])]]), "expected a number of one of 3 buffers, got 3"),
        (
            program(given=FolderRows(0, 64, 128, 32, 32)),
            "given: expected a part of the 128 bytes of a, got 128 from 64",
        ),
        (
            program(made=FolderRows(1, 0, 100, 32, 32)),
            "made: expected whole lines, got 100 bytes in lines of 32 with 32",
        ),
        (
            program(given=FolderRows(0, 0, 128, 33, 32)),
            "given: expected whole lines, .* in lines of 32 with 33 elements",
        ),
        (program(given=FolderRows(2, 0, 64, 32, 32)), "given: expected a buffer that is no cache"),
        (program(tokens=0), "program decode is for no tokens"),
    ],
)
def test_program_beyond_buffers_is_refused(tmp_path, changed, message):
    folder = write_folder(tmp_path / "artifacts" / "emulate", [np.arange(9)] * 2, CALLS, [changed])
    with refused(f"{message}.*; build them again: "):
        Artifacts(str(folder))


def test_program_beyond_memory_is_refused_before_allocation(tmp_path):
    """If it were allocated, the process would end, at once or when the memory is first written."""
    large = program("encode", [[(1, "gemm", [(0, 0), (1, 0)])]])
    large.buffers = [("a", 2, 1 << 50, 0, 0), ("c", 2, 4096, 0, 0)]
    folder = write_folder(tmp_path / "artifacts" / "emulate", [np.arange(9)] * 2, CALLS, [large])
    sizes = {
        "channels": 3, "patch": 2, "grid": 2, "hidden": 32, "heads": 1, "head_size": 32, "feed_forward": 32,
        "layers": 1, "pooling": 1, "features": 32, "epsilon": 0.0, "pooled_epsilon": 0.0, "scale": 0.0,
    }  # fmt: skip
    model = npu.Partition([("node", "EncoderLayers", "ai.flownpu.npu", sizes, [], [])])
    device = npu.NpuDevice(str(folder))
    with refused(r"expected programs whose buffers fit the \d+ MB of this machine, got a of 1073741824 MB") as e:
        device.prepare(model.nodes[0])
    assert e.value.failure == "memory"
    assert "build them for a shorter context" in str(e.value)


def test_missing_folder_is_refused(tmp_path):
    folder = tmp_path / "artifacts" / "emulate"
    with refused(
        "expected the compiled designs of this model in .*, found no index.words; build .*" + again(folder, "")
    ):
        Artifacts(str(folder))
    with refused("`flownpu build MODEL --for emulate --output .*elsewhere`"):
        Artifacts(str(tmp_path / "elsewhere"))
    with refused(f"`flownpu build {tmp_path} --for xclbin`"):
        Artifacts(str(tmp_path / "artifacts" / "npu2"), emulated=False)


def test_folders_of_other_kind_are_refused(folder, tmp_path):
    with refused("has designs for the emulator, expected designs for a real NPU"):
        Artifacts(str(folder), emulated=False)
    real = write_folder(tmp_path / "npu2", [], [], emulated=False)
    assert not Artifacts(str(real), emulated=False).emulated
    with refused("has designs for a real NPU, expected designs for the emulator"):
        Artifacts(str(real))


def test_folder_of_other_target_is_refused(tmp_path):
    folder = write_folder(tmp_path / "npu3", [], [], target="npu3")
    with refused("npu3 has designs for 'npu3', expected designs for npu1 or npu2; build them again"):
        Artifacts(str(folder))


def test_damaged_index_is_refused(folder):
    index = folder / "index.words"
    whole = index.read_bytes()
    damage(index)
    with refused("index.words is damaged: its sum is another; build them again: " + again(folder, "")):
        Artifacts(str(folder))
    for content, message in [
        (whole[:-3], "index.words ends in the middle of a word"),
        (whole[:24], "index.words ends in the middle"),
        (whole[:-8], "index.words is damaged"),
        (b"", "index.words ends in the middle"),
        (b"FlowNPU." + whole[8:], "these are no words that FlowNPU wrote"),
        (whole[:8] + b"\x03" + whole[9:], "expected version 6, got version 3: write it again"),
        (whole[:16] + b"\x04" + whole[17:], "expected an index of artifacts"),
    ]:
        index.write_bytes(content)
        with refused(message + ".*; build them again"):
            Artifacts(str(folder))


def test_files_other_than_built_are_refused(folder):
    artifacts = Artifacts(str(folder))
    call = artifacts.call(1)
    array, family = folder / "arrays" / "array_1.words", folder / "calls" / "array_1" / "gemm_64_32.words"
    damage(array, 399_999)
    damage(family)
    for path, read in [(array, artifacts.array_file), (family, artifacts.family)]:
        with refused(f"{path} is not the file that was built: its sum is another; .*" + again(folder)) as e:
            read(call)
        assert e.value.failure == "artifact"
        path.unlink()
        with refused(f"{path} cannot be read; build them again"):
            read(call)


@pytest.mark.parametrize("size", [0, 1, 9, 100_000])
def test_checksums_equal_zlib(size, rng):
    data = rng.bytes(size)
    assert npu.crc32(data) == zlib.crc32(data)

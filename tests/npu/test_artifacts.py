# SPDX-License-Identifier: Apache-2.0
"""What the host finds in a folder of artifacts, and what it says where something is missing or damaged."""

import re
import zlib

import numpy as np
import pytest

from tests.npu.folders import CallClass, FolderCall, family_words, write_folder
from tests.ops.device import testing

Artifacts = testing.npu.Artifacts
DeviceError = testing.npu.DeviceError


def product(rows, n, **others):
    name = f"gemm_{rows}_{n}"
    family = family_words([CallClass([rows, n])], positions=8, name=name)
    buffers = [("a", 2 * rows), ("c", 2 * rows * n)]
    return FolderCall("gemm", name, {"rows": [rows], "n": [n], **others}, family, buffers, array=1)


@pytest.fixture
def folder(tmp_path):
    """Of a model in `tmp_path`."""
    norm = FolderCall("rms_norm", "norm", {"rows": [64], "windows": [0, 512]}, family_words([CallClass([5])]))
    calls = [norm, product(64, 32), product(64, 96), product(256, 32)]
    return write_folder(tmp_path / "artifacts" / "emulate", [np.arange(9), np.arange(50_000)], calls)


def refused(message):
    return pytest.raises(DeviceError, match=message)


def again(folder, target=" --target npu2"):
    return f"`flownpu build {re.escape(str(folder.parents[1]))} --for emulate{target}`"


def damage(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_what_is_there_is_found(folder):
    artifacts = Artifacts(str(folder))
    assert (artifacts.target, artifacts.emulated, artifacts.identity) == ("npu2", True, "an identity")
    assert [call.name for call in artifacts.find("gemm", {})] == ["gemm_64_32", "gemm_64_96", "gemm_256_32"]
    assert [call.name for call in artifacts.find("gemm", {"n": [32]})] == ["gemm_64_32", "gemm_256_32"]
    assert artifacts.find("gemm", {"k": [32]}) == artifacts.find("flow_kv", {}) == []
    call = artifacts.require("gemm", {"n": [96]})
    assert (call.op_type, call.name, call.array) == ("gemm", "gemm_64_96", 1)
    assert call.attributes == {"rows": [64], "n": [96]}
    assert call.buffers == [("a", 128), ("c", 2 * 64 * 96)]
    assert artifacts.array_file(call) == str(folder / "arrays" / "array_1.words")
    assert artifacts.family(call).words(7) == [64, 96]
    assert artifacts.require("rms_norm", {"windows": [0, 512]}).array == 0


def test_a_call_that_is_not_there_is_refused_with_the_nearest(folder):
    artifacts = Artifacts(str(folder))
    with refused(
        r"expected gemm with n 96, rows 256 in .*; there is gemm_64_96 with rows 64; gemm_256_32 with n 32; "
    ) as e:
        artifacts.require("gemm", {"rows": [256], "n": [96]})
    assert "gemm_64_32 with n 32, rows 64; build the designs of this model: " in str(e.value)
    assert str(e.value).endswith(again(folder).replace("\\", ""))
    assert e.value.failure == "artifact"
    with refused("expected flow_kv with d 64 in .*; there is none of flow_kv; build .*" + again(folder)):
        artifacts.require("flow_kv", {"d": [64]})
    with refused("has several calls of gemm with n 32: gemm_64_32, gemm_256_32; build them again"):
        artifacts.require("gemm", {"n": [32]})


def test_of_many_calls_the_nearest_are_told(tmp_path):
    calls = [product(64, n) for n in range(32, 32 * 9, 32)]
    artifacts = Artifacts(str(write_folder(tmp_path, [np.arange(1)] * 2, calls)))
    with refused("gemm_64_32 with n 32; gemm_64_64 with n 64; gemm_64_96 with n 96; and 5 more; build"):
        artifacts.require("gemm", {"rows": [64], "n": [7]})


def test_no_folder(tmp_path):
    folder = tmp_path / "artifacts" / "emulate"
    with refused(
        "expected the compiled designs of this model in .*, found no index.words; build .*" + again(folder, "")
    ):
        Artifacts(str(folder))
    with refused("`flownpu build MODEL --for emulate --output .*elsewhere`"):
        Artifacts(str(tmp_path / "elsewhere"))
    with refused(f"`flownpu build {tmp_path} --for xclbin`"):
        Artifacts(str(tmp_path / "artifacts" / "npu2"), emulated=False)


def test_folders_of_the_other_kind(folder, tmp_path):
    with refused("has designs for the emulator, expected designs for a real NPU"):
        Artifacts(str(folder), emulated=False)
    real = write_folder(tmp_path / "npu2", [], [], emulated=False)
    assert not Artifacts(str(real), emulated=False).emulated
    with refused("has designs for a real NPU, expected designs for the emulator"):
        Artifacts(str(real))


def test_a_folder_of_another_target(tmp_path):
    folder = write_folder(tmp_path / "npu3", [], [], target="npu3")
    with refused("npu3 has designs for 'npu3', expected designs for npu1 or npu2; build them again"):
        Artifacts(str(folder))


def test_a_damaged_index(folder):
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
        (whole[:8] + b"\x02" + whole[9:], "expected version 1, got version 2: write it again"),
        (whole[:16] + b"\x04" + whole[17:], "expected an index of artifacts"),
    ]:
        index.write_bytes(content)
        with refused(message + ".*; build them again"):
            Artifacts(str(folder))


def test_files_that_are_not_those_that_were_built(folder):
    artifacts = Artifacts(str(folder))
    call = artifacts.require("gemm", {"n": [96]})
    array, family = folder / "arrays" / "array_1.words", folder / "calls" / "array_1" / "gemm_64_96.words"
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
def test_sums_are_those_of_zlib(size, rng):
    data = rng.bytes(size)
    assert testing.npu.crc32(data) == zlib.crc32(data)

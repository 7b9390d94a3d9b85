# SPDX-License-Identifier: Apache-2.0
"""Folders of artifacts: the index names the existing files, and up-to-date files are kept."""

import hashlib
import json
import zlib

import numpy as np
import pytest

from flownpu.aie.artifacts.emulated import write_emulated
from flownpu.aie.check.violation import PlanError
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.vector_operators import RMSNorm
from flownpu.aie.emulator.flatten import flatten_array
from flownpu.aie.programs.alone import program_of
from flownpu.aie.programs.call import fixed_call, moving_call
from flownpu.aie.programs.call_family import CallSweep
from tests.aie.words import read_index, words_of

NORM, FLOW = RMSNorm("npu2", 64), FlowKV("npu2", 2, 1, 32, keys=16)
CONTEXT = 64


def norm(rows, make=None, array="rms_norm-n64"):
    return fixed_call("rms_norm", array, f"rows{rows}", make or (lambda: NORM.program(rows, 1e-6)), CONTEXT)


FLOW_CALL = moving_call(
    "flow_kv", "flow_kv-h2", "token", lambda position: FLOW.program(position + 1, CONTEXT), "npu2", CONTEXT, FLOW.keys,
    [CallSweep(0, 1, 1, 0)],
)  # fmt: skip
CALLS = [norm(4), norm(8), FLOW_CALL]


def write(folder, calls=CALLS):
    return write_emulated(folder, "npu2", [program_of(calls, CONTEXT)], about={"versions": {"flownpu": "1"}})


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_index_names_files_on_disk(tmp_path):
    folder = tmp_path / "some" / "folder"
    assert write(folder) == 3
    target, emulated, identity, arrays, calls, _, (program,) = read_index(folder)
    assert (target, emulated, len(identity)) == ("npu2", 1, 64)
    assert [name for name, _, _ in arrays] == ["rms_norm-n64", "flow_kv-h2"]
    assert [(call["operator"], call["name"], call["array"]) for call in calls] == [
        ("rms_norm", "rows4", 0), ("rms_norm", "rows8", 0), ("flow_kv", "token", 1),
    ]  # fmt: skip
    assert program["sizes"] == {"tokens": 1, "fewest": 1, "context": CONTEXT}
    assert [[(call, label) for call, label, *_ in steps] for _, steps in program["dispatches"]] == [
        [(0, "rms_norm, alone"), (1, "rms_norm, alone")], [(2, "flow_kv, alone")],
    ]  # fmt: skip
    assert program["buffers"][:3] == [(f"rows4 {name}", 2, size, 0, 0) for name, size in calls[0]["buffers"]]
    assert calls[0]["buffers"] == [("x", 2 * 4 * 64), ("weight", 2 * 64), ("y", 2 * 4 * 64)]
    named = {file: total for _, file, total in arrays} | {call["file"]: call["sum"] for call in calls}
    on_disk = contents(folder)
    assert {*named, "index.words", "manifest.json"} == on_disk.keys()
    assert named == {file: zlib.crc32(on_disk[file]) for file in named}


def test_index_has_arrays_and_families_of_programs(tmp_path):
    write(tmp_path / "folder")
    _, _, _, arrays, calls, *_ = read_index(tmp_path / "folder")
    for call, record in zip(CALLS, calls, strict=True):
        plan = call.plan(call.last)
        flat = flatten_array(plan.array)
        np.testing.assert_array_equal(words_of(tmp_path / "folder" / arrays[record["array"]][1]), flat.words)
        family = call.family(lambda position, flat=flat, call=call: flat.flatten(call.plan(position).sequence))
        np.testing.assert_array_equal(
            words_of(tmp_path / "folder" / record["file"]), family.flatten(call.name, flat.identity)
        )


def test_manifest_has_checksum_of_files(tmp_path):
    write(tmp_path / "folder")
    on_disk = contents(tmp_path / "folder")
    manifest = json.loads(on_disk["manifest.json"])
    sums = {record["file"]: record["sha256"] for record in manifest["arrays"].values()}
    sums |= {file: record["sha256"] for file, record in manifest["calls"].items()}
    assert sums == {file: hashlib.sha256(on_disk[file]).hexdigest() for file in sums}
    assert len(sums) == len(on_disk) - 2
    assert manifest["versions"] == {"flownpu": "1"}


# --- What is made again -----------------------------------------------------------------------------------------------


def test_current_folder_is_kept(tmp_path):
    write(tmp_path / "folder")
    before = contents(tmp_path / "folder")
    assert write(tmp_path / "folder") == 0
    assert contents(tmp_path / "folder") == before


def test_damaged_file_is_made_again(tmp_path):
    write(tmp_path / "folder")
    before = contents(tmp_path / "folder")
    (tmp_path / "folder" / "calls/flow_kv-h2/token.words").write_bytes(b"damaged")
    (tmp_path / "folder" / "arrays/flow_kv-h2.words").unlink()
    assert write(tmp_path / "folder") == 1
    assert contents(tmp_path / "folder") == before


def test_changed_program_is_made_again_and_unused_files_are_removed(tmp_path):
    write(tmp_path / "folder")
    before = read_index(tmp_path / "folder")
    changed = norm(4, lambda: NORM.program(4, 1e-5))
    assert write(tmp_path / "folder", [changed, norm(8)]) == 1
    after = read_index(tmp_path / "folder")
    assert before[2] != after[2]
    assert not (tmp_path / "folder" / "calls" / "flow_kv-h2").exists()


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        # L1 has no room for so many rows.
        (
            norm(2, lambda: RMSNorm("npu2", 32768).program(2, 1e-6), "large"),
            PlanError,
            "need .* bytes, have 65536 bytes",
        ),
        (
            norm(2, lambda: RMSNorm("npu2", 32).program(2, 1e-6)),
            ValueError,
            "two arrays that differ are both called rms_norm-n64: rows2 is of the second",
        ),
    ],
)
def test_failed_write_leaves_files_unchanged(tmp_path, bad, error, message):
    write(tmp_path / "folder")
    before = contents(tmp_path)
    with pytest.raises(error, match=message):
        write(tmp_path / "folder", [*CALLS, bad])
    assert contents(tmp_path) == before
    with pytest.raises(error):
        write(tmp_path / "other", [norm(4), bad])
    assert contents(tmp_path) == before


def test_folder_of_older_format_is_made_again(tmp_path):
    write(tmp_path / "folder")
    before = contents(tmp_path / "folder")
    manifest = tmp_path / "folder" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("emulated-3", "emulated-1"))
    assert write(tmp_path / "folder") == 3
    assert contents(tmp_path / "folder") == before


@pytest.mark.parametrize("manifest", [None, "no json", '{"format": 1, "calls": {}}', "[]"])
def test_folder_of_other_kind_is_refused(tmp_path, manifest):
    (tmp_path / "something").write_text("else")
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="to be a folder of artifacts for the emulator, and it is not: choose another"):
        write(tmp_path)
    assert contents(tmp_path) == before

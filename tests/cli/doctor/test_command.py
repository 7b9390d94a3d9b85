# SPDX-License-Identifier: Apache-2.0
"""`flownpu doctor` as a command: on this machine, on models, and its remedies for a session's errors."""

import json

import flownpu.doctor.diagnosis
import flownpu.doctor.npu
import flownpu.doctor.xrt
from flownpu.doctor.checks import Check, Host, Status
from flownpu.doctor.npu import (
    FULL,
    JOIN_THE_GROUP,
    MORE_LOCKED_MEMORY,
    MORE_LOCKED_MEMORY_OF_ROOT,
    TOO_OLD,
    diagnose_model,
)  # fmt: skip
from flownpu.npu.artifacts import build_artifacts


def test_doctor_on_sound_machine_finds_no_fault(flownpu):
    done = flownpu("doctor", "--json")
    report = json.loads(done.out)
    checks = {check["name"]: check for check in report["checks"]}
    for name in ("python", "onnxruntime", "onnxruntime-genai", "provider library", "registration"):
        assert checks[name]["status"] == "good", checks[name]
    assert done.code == (0 if report["ok"] else 1)


def test_doctor_with_bad_check_fails(flownpu, monkeypatch):
    bad = Check("npu", Status.BAD, "[0000:c5:00.1] has no driver", "sudo modprobe amdxdna")
    monkeypatch.setattr("flownpu.cli.doctor.diagnose", lambda *_: iter([Check("python", Status.GOOD, "3.14"), bad]))
    done = flownpu("doctor")
    assert done.code == 1
    assert done.out.splitlines() == [
        "ok   python  3.14",
        "BAD  npu     [0000:c5:00.1] has no driver",
        "             mend it with: sudo modprobe amdxdna",
        "Something is broken.",
    ]
    assert json.loads(flownpu("doctor", "--json").out)["ok"] is False


def test_doctor_with_note_alone_succeeds(flownpu, monkeypatch):
    monkeypatch.setattr("flownpu.cli.doctor.diagnose", lambda *_: iter([Check("npu", Status.NOTE, "none")]))
    assert flownpu("doctor").code == 0


def test_model_without_artifacts_is_bad(flownpu, model):
    done = flownpu("doctor", model)
    assert done.code == 1
    assert f"none for device=emulate in {model / 'artifacts' / 'emulate'}" in done.out
    assert f"mend it with: flownpu build {model} --for emulate" in done.out


def test_model_with_damaged_artifacts_is_bad(flownpu, model_copy):
    built = build_artifacts(model_copy, context=64)
    checks = {check["name"]: check for check in json.loads(flownpu("doctor", model_copy, "--json").out)["checks"]}
    assert checks["artifacts"]["status"] == checks["a token"]["status"] == "good"
    assert "1 dispatch a token" in checks["a token"]["found"]
    file = next((built.folder / "calls").glob("decode_layer*/*.words"))
    file.write_bytes(file.read_bytes()[:-8])
    done = flownpu("doctor", model_copy)
    assert done.code == 1
    assert file.name in done.out
    assert f"mend it with: flownpu build {model_copy} --for emulate" in done.out


def test_remedy_follows_error_of_session(machine, tmp_path, monkeypatch):
    machine.ready()
    (tmp_path / "artifacts/npu2").mkdir(parents=True)
    (tmp_path / "artifacts/npu2/index.words").touch()

    def remedy(said):
        def refuse(*_args, **_options):
            raise RuntimeError(said)

        monkeypatch.setattr(flownpu.doctor.npu, "LanguageModel", refuse)
        check = list(diagnose_model(Host(root=machine.root), tmp_path, emulated=False))[-1]
        assert (check.name, check.status, check.found) == ("a token", Status.BAD, said)
        return check.remedy

    assert remedy(f"array.xclbin on NPU Strix, firmware 1.0.0.63, XRT 2.25: no; {TOO_OLD}") == (
        "sudo apt install firmware-amd-graphics && sudo modprobe -r amdxdna && sudo modprobe amdxdna, and if that "
        "changes nothing sudo apt install linux-image-amd64 && sudo reboot"
    )
    assert remedy(f"No space left on device; {FULL}").startswith("xrt-smi examine --report aie-partitions")
    assert remedy(f"Permission denied; join the group of the device file: {JOIN_THE_GROUP}") == JOIN_THE_GROUP
    said = f"Cannot allocate memory; {MORE_LOCKED_MEMORY}; as root {MORE_LOCKED_MEMORY_OF_ROOT}"
    assert remedy(said) == MORE_LOCKED_MEMORY
    machine.lockable("unlimited", user=0)
    assert remedy(said) == MORE_LOCKED_MEMORY_OF_ROOT
    assert remedy("the array did not answer") == "sudo dmesg | grep amdxdna"


def test_failed_checks_name_remedy():
    """The documentation promises it. Read from the source: each Check that is BAD has a remedy."""
    import ast
    import inspect

    source = "".join(
        inspect.getsource(module) for module in (flownpu.doctor.diagnosis, flownpu.doctor.npu, flownpu.doctor.xrt)
    )
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Check"]
    bad = [call for call in calls if ast.unparse(call.args[1]) == "Status.BAD"]
    assert bad
    assert all(len(call.args) == 4 for call in bad)

# SPDX-License-Identifier: Apache-2.0
"""The provider's options: valid ones are taken, all others are errors that list the valid ones."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

from flownpu import _native
from tests.ep.conftest import MakeSession, Placed, parse

MODEL = "g (float[3] x) => (float[3] z) { z = Add(x, x) }"

PRICES = "measured seconds prompt=4 answer=1 | cpu 4=1 token=1"


# providers=[...] and add_provider_for_devices() lead to different code in onnxruntime, and both must fail: its Python
# session takes some errors as a hint to start again on the CPU provider.
@pytest.mark.parametrize("by_name", [False, True], ids=["add_provider_for_devices", "providers"])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "colour",
            "red",
            "option colour = 'red' is not known; the options are: device, prompt_threshold, prefer, p",
        ),
        ("device", "tpu", "option device = 'tpu' is not known; expected one of: auto, cpu, npu, emulate, gpu"),
        ("device", "npu+tpu", "option device = 'tpu' is not known; expected one of: auto, cpu, npu, emulate, gpu"),
        (
            "device",
            "cpu+cpu",
            r"option device = 'cpu\+cpu' is not valid; expected two different ones of cpu, gpu and npu",
        ),
        ("device", "npu+emulate", r"option device = 'npu\+emulate' is not valid"),
        ("device", "auto+cpu", r"option device = 'auto\+cpu' is not valid"),
        (
            "prompt_threshold",
            "1",
            "option prompt_threshold = '1' is not valid; expected a number of new tokens, 2",
        ),
        ("prefer", "price", "option prefer = 'price' is not known; expected one of: speed, energy"),
        ("prefer", "energy", "expected prices in joules, and the option prices has none at all; `flownpu tune MODEL"),
        *(
            ("prices", text, "option prices: expected tables such as 'measured seconds prompt=512 .*, got '")
            for text in (
                "",
                "measured",
                "measured minutes prompt=4 answer=1 | cpu 4=1 token=1",
                f"{PRICES} | gpu 4=1",
                f"{PRICES} | gpu 8=1 token=1",
                f"{PRICES} | gpu 4=-1 token=1",
                f"{PRICES} | gpu 4=nan token=1",
                f"{PRICES} | gpu 4=1x token=1",
                f"{PRICES} | 4=1 token=1",
                f"{PRICES} | gpu npu 4=1 token=1",
                f"{PRICES};",
                "measured seconds prompt=4 answer=1",
                PRICES.replace("=4 ", "=4.5 "),
                PRICES.replace("answer=1 ", ""),
            )
        ),
        ("prices", f"{PRICES} | tpu 4=1 token=1", "option prices = 'tpu' is not known; expected one of: auto, cpu"),
        ("prices", f"{PRICES} | auto 4=1 token=1", "option prices: expected a device, got auto"),
        ("on_unsupported", "", "option on_unsupported = '' is not known; expected one of: error, warn, cpu"),
        ("activations", "f32", "option activations = 'f32' is not known; expected one of: bf16, int8"),
        ("threads", "-1", r"option threads = '-1' is not valid; expected an integer from 0 \(one for each core\)"),
        ("threads", "2x", "option threads = '2x' is not valid"),
        ("threads", "99999999999", "option threads = '99999999999' is not valid"),
        ("cpu_isa", "mmx", "cpu_isa.*generic.*'mmx'"),
        ("gpu_dtype", "bf16", "option gpu_dtype = 'bf16' is not known; expected one of: auto, fp16, fp32"),
        ("gpu_weights", "", "option gpu_weights = '' is not known; expected one of: auto, buffer, image"),
        ("gpu_matrices", "1", "option gpu_matrices = '1' is not known; expected one of: auto, on, off"),
        ("gpu_winograd", "", "option gpu_winograd = '' is not known; expected one of: auto, on, off"),
        ("placement", "there", "option placement = 'there' is not known; expected one of: log, stderr, the path of"),
    ],
)
def test_invalid_options_are_refused(
    make_session: MakeSession, by_name: bool, key: str, value: str, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        make_session(MODEL, {key: value}, by_name=by_name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device", "auto"),
        ("device", "cpu"),
        ("on_unsupported", "error"),
        ("on_unsupported", "warn"),
        ("on_unsupported", "cpu"),
        ("activations", "bf16"),
        ("activations", "int8"),
        ("threads", "0"),
        ("threads", "3"),
        ("cpu_isa", "auto"),
        ("cpu_isa", "generic"),
        ("artifacts", "anywhere"),
        ("gpu_dtype", "auto"),
        ("gpu_dtype", "fp16"),
        ("gpu_weights", "image"),
        ("gpu_matrices", "off"),
        ("gpu_winograd", "on"),
        ("placement", "log"),
    ],
)
def test_valid_options_are_accepted(make_session: MakeSession, key: str, value: str) -> None:
    make_session(MODEL, {key: value}, strict=True)


def test_options_reach_device(placed: Placed) -> None:
    _, placement = placed(MODEL, {"device": "cpu", "cpu_isa": "generic", "threads": "3", "activations": "int8"})
    assert placement["device"] == "cpu (generic, 3 threads, int8 activations)"
    assert placement["why"] == "device=cpu"


def test_placement_of_sessions_made_at_once_is_whole(make_session: MakeSession, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with ThreadPoolExecutor(8) as threads:
        made = [threads.submit(make_session, MODEL, {"placement": str(path)}) for _ in range(80)]
    for session in made:
        session.result()
    assert json.loads(path.read_text())["nodes"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_placement_on_stderr_is_one_line(make_session: MakeSession, capfd: pytest.CaptureFixture[str]) -> None:
    make_session(MODEL, {"placement": "stderr"})
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("FlowNPU: 1 of 1 nodes in 1 partition on cpu (")
    assert "because device=auto and " in lines[0]


def test_placement_is_in_log_and_nowhere_else(make_session: MakeSession, capfd: pytest.CaptureFixture[str]) -> None:
    make_session(MODEL)
    assert capfd.readouterr().err == ""
    information = 1
    make_session(MODEL, configure={"log_severity_level": information})
    assert "FlowNPU: 1 of 1 nodes in 1 partition on cpu (" in capfd.readouterr().err


def test_placement_is_written_to_file(make_session: MakeSession, tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    name = 'a "name"\n of\tthe \\ worst é'
    model = parse("g (float[2,2] x) => (float z) { a = Add(x, x)  z = Det(a) }")
    model.graph.node[1].name = name
    make_session(model, {"placement": str(path), "on_unsupported": "cpu"})
    placement = json.loads(path.read_text())
    assert [file.name for file in tmp_path.iterdir()] == ["placement.json"], "the file with the unfinished name is left"
    assert placement["summary"].startswith("FlowNPU: 1 of 2 nodes")
    assert placement["left"][0]["node"] == f"Det '{name}'"
    facts = "nodes claimed elsewhere partitions multiply_adds claimed_multiply_adds device why summary whole_prompts"
    assert " ".join(placement) == f"{facts} lowered on_host left inlined control_flow"


@pytest.mark.parametrize(("size", "share"), [("4, 4", " and 14.3 % of multiply-adds"), ("H, W", "")])
def test_placement_counts_pixels_of_convolutions_that_are_left(
    make_session: MakeSession, tmp_path: Path, size: str, share: str
) -> None:
    """Left, as its weight is fed: 3 x 3 for each of 16 pixels; taken: 3 rows of 8. Without a size there is no share."""
    model = parse(
        f"g (float[1, 1, {size}] x, float[1, 1, 3, 3] w, float[3, 1] v) => (float[1, 1, {size}] y, float[3, 8] z)"
        "<float[1, 8] m = {1, 1, 1, 1, 1, 1, 1, 1}>"
        "{ y = Conv<pads = [1, 1, 1, 1]>(x, w)  z = MatMul(v, m) }"
    )
    path = tmp_path / "placement.json"
    make_session(model, {"placement": str(path), "on_unsupported": "cpu"})
    assert f"nodes{share} in" in json.loads(path.read_text())["summary"]


def test_placement_file_in_folder_has_models_name(make_session: MakeSession, tmp_path: Path) -> None:
    for name, additions in (("first", 1), ("second", 2)):
        nodes = " ".join(f"x{i + 1} = Add(x{i}, x{i})" for i in range(additions))
        model = parse(f"g (float[2,2] x0) => (float[2,2] x{additions}) {{ {nodes} }}")
        onnx.save(model, tmp_path / f"{name}.onnx")
        make_session(tmp_path / f"{name}.onnx", {"placement": f"{tmp_path}/"})
    make_session(MODEL, {"placement": f"{tmp_path}/"})
    reports = {file.stem: json.loads(file.read_text())["nodes"] for file in tmp_path.glob("*.json")}
    assert reports == {"first": 1, "second": 2, "model": 1}


def test_unwritable_placement_file_is_refused(make_session: MakeSession, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"option placement: cannot write '.*missing/placement\.json': No such"):
        make_session(MODEL, {"placement": str(tmp_path / "missing" / "placement.json")})


def test_slow_kernels_are_reported_once(make_session: MakeSession, capfd: pytest.CaptureFixture[str]) -> None:
    session = make_session(MODEL, {"cpu_isa": "generic"})
    for _ in range(2):
        session.run(None, {"x": np.ones(3, np.float32)})
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "FlowNPU" in line)
    assert "the plain C++ kernels compute, which are correct and many times slower" in line
    has_more = _native.instruction_sets() != ["generic"]
    assert ("set the provider option cpu_isa to auto" if has_more else "this processor has neither") in line


@pytest.mark.skipif(_native.instruction_sets() == ["generic"], reason="this processor has plain C++ only")
def test_default_session_warns_of_nothing(make_session: MakeSession, capfd: pytest.CaptureFixture[str]) -> None:
    make_session(MODEL)
    assert "FlowNPU" not in capfd.readouterr().err

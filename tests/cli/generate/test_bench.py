# SPDX-License-Identifier: Apache-2.0
"""The report of `flownpu bench` is consistent; no test here asserts how fast anything is."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import psutil
import pytest

from flownpu import _native
from flownpu.bench.busy import busy_cores
from flownpu.bench.measurement import Case, Engine, Measurement, Measurements, Spread, measure
from flownpu.bench.report import BenchReport
from flownpu.bench.roofline import DecodeTraffic, decode_traffic, graph_traffic, read_bandwidth
from flownpu.errors import FlowNPUError
from flownpu.machine import Machine
from flownpu.model.summary import summarize

CPU = ("--device", "cpu")
SMALL = ("--prompt", 40, "--generate", 5, "--repeats", 1)

# An engine that reads a token in 1 ms and generates one in 4 ms; `mood` comes with the options.
PEER = """
import time

class Engine:
    version = "peer 1.0"
    placement = ""

    def __init__(self, folder, *, threads, context, options):
        self.mood = options.get("mood", "")
        if self.mood == "refuses":
            raise ValueError("the model has no weights")

    def start(self, length):
        self.room = length

    def read(self, tokens):
        self.room -= len(tokens)
        time.sleep(0.001 * len(tokens))

    def generate_next(self):
        if self.mood == "dies":
            raise SystemExit(3)
        self.room -= 1
        assert self.room >= 0
        time.sleep(3600 if self.mood == "sleeps" else 0.004)
        return 0
"""


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the bandwidth unmeasured, which takes half a second a round and matters to no test here."""
    monkeypatch.setattr("flownpu.bench.measurement.read_bandwidth", lambda _threads: 1e9)


def test_read_memory_looks_at_each_line_of_64_bytes():
    words = np.zeros(20 * 8, np.uint64)
    words[::8] = 1 << np.arange(20, dtype=np.uint64)
    assert _native.read_memory(words) == 2**20 - 1


def test_read_bandwidth_binds_a_thread_to_each_core(monkeypatch):
    cores = os.sched_getaffinity(0)
    bound = []

    def bind(thread, mask):
        bound.append((thread, mask))
        os_bind(thread, mask)

    os_bind = os.sched_setaffinity
    monkeypatch.setattr("os.sched_setaffinity", bind)
    monkeypatch.setattr("flownpu.bench.roofline._SECONDS", 0.01)  # the rate does not matter here
    monkeypatch.setattr("flownpu.bench.roofline._BUFFER_BYTES", 1 << 20)
    assert read_bandwidth() > 0
    # Each core is bound by a separate thread (0), and this thread may still run on all cores.
    assert sorted(bound, key=str) == sorted([(0, {core}) for core in cores], key=str)
    assert os.sched_getaffinity(0) == cores


def test_decode_step_traffic_equals_hand_count(model):
    traffic = decode_traffic(model)
    weights = {weight.name: weight.bytes for weight in summarize(model).weights}
    # The tied table is read whole by the LM head, and a row of it by the embedding; rotary caches are only looked up.
    scalars = sum(size for name, size in weights.items() if not name.startswith("rotary.") and size <= 16)
    expected = sum(size for name, size in weights.items() if not name.startswith("rotary."))
    assert expected - scalars <= traffic.weights <= expected
    # Keys and values of 2 heads of 64 in bf16: 512 bytes a token and layer; five layers see 64 tokens, the sixth all.
    assert traffic.bytes_at(1000) - traffic.bytes_at(0) == 512 * (5 * 64 + 1000)


def test_decode_step_counts_weights_of_chosen_experts():
    def constant(name: str, *shape: int) -> ir.Value:
        tensor = ir.tensor(np.zeros(shape, np.uint8))
        return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)

    weights = [constant("router", 60), constant("gate_up", 6, 100), constant("down", 6, 50)]
    x = ir.Value(name="x")
    node = ir.node(
        "Q4NXMoE", [x, *weights], {"num_experts": 6, "experts_per_token": 2}, domain="ai.flownpu", name="moe"
    )
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=weights)
    # All of the router, and 2 of 6 experts.
    assert graph_traffic(graph).weights == graph_traffic(graph).node_bytes_at("moe", 7) == 60 + 2 * (100 + 50)


def test_decode_step_counts_each_state_whatever_the_context():
    past = ir.Value(name="past", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch_size", 4, 16, 8]))
    others = [ir.Value(name=name) for name in ("query", "key", "value")]
    node = ir.node("LinearAttention", [*others, past], domain="com.microsoft", name="delta")
    traffic = graph_traffic(ir.Graph([*others, past], node.outputs, nodes=[node]))
    assert traffic.bytes_at(0) == traffic.bytes_at(9000) == traffic.node_bytes_at("delta", 7) == 4 * 4 * 16 * 8


@pytest.fixture
def peer(tmp_path: Path):
    script = tmp_path / "peer.py"
    script.write_text(PEER)

    def make(name: str = "peer", mood: str = "") -> Engine:
        return Engine(name, Path(os.sys.executable), script, tmp_path, {"mood": mood})

    return make


def wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_spread_is_reported():
    assert Spread.of([5.0, 1.0, 3.0]) == Spread(median=3.0, minimum=1.0, maximum=5.0)


def test_json_has_all_cases(flownpu, model):
    report = json.loads(flownpu("bench", model, *SMALL, "--depth", "0,64", "--repeats", 2, "--json", "-", *CPU).out)
    assert report["settings"]["repeats"] == 2
    own = report["engines"]["flownpu"]
    assert [(case["depth"], case["prompt"], case["generate"]) for case in own["cases"]] == [(0, 40, 5), (64, 40, 5)]
    for case in own["cases"]:
        assert case["runs"] == 2
        for rate in (case["prefill_rate"], case["decode_rate"], case["first_token_seconds"]):
            assert 0 < rate["minimum"] <= rate["median"] <= rate["maximum"]
        # The first token cannot come before the prompt's 40 tokens have been read.
        assert case["first_token_seconds"]["maximum"] >= 40 / case["prefill_rate"]["maximum"]
        assert case["prefill_ratio"] == case["decode_ratio"] == 1
        assert case["decode_roof"] > 0
    assert own["load_seconds"]["minimum"] > 0
    memory = own["memory"]
    assert memory["before"] < memory["resident"] <= memory["peak"]
    assert 0 < memory["anonymous"] < memory["resident"]
    assert report["read_bandwidth"]["minimum"] > 0
    # One hardware thread of each core computes.
    assert 0 < report["machine"]["cores"] <= len(os.sched_getaffinity(0))
    assert {"flownpu", "onnxruntime", "onnxruntime-genai"} <= report["machine"]["versions"].keys()


@pytest.mark.parametrize("device", ["npu+gpu", "gpu"])
@pytest.mark.parametrize("joules", [(3.0, 8.0), (None, None)])
def test_switch_and_energy_are_in_report(device: str, joules: tuple[float | None, float | None]) -> None:
    """The first of four steps takes 0.7 s, and the others 0.1 s each."""
    case, measured = Case(0, 10, 5), Measurement()
    times = {"prefill_seconds": 1, "first_token_seconds": 1, "decode_seconds": 1.0, "first_step_seconds": 0.7}
    measured.add(case, times | {"prefill_joules": joules[0], "decode_joules": joules[1]})
    machine = Machine("", "", 1, 1, "", "", {})
    report = BenchReport(machine, "model", {"device": device}, None, Measurements([case], {"flownpu": measured}))
    rows = dict(report.resources())
    assert rows.get("switch after 10, ms") == ("600" if "+" in device else None)
    assert (rows.get("J, prefill 10"), rows.get("J a token at 10")) == (("3", "2") if joules[0] else (None, None))
    assert any("Energy was not measured" in line for line in report.footer()) == (joules[0] is None)
    (found,) = report.json()["engines"]["flownpu"]["cases"]
    assert (found["switch_seconds"] is None) == ("+" not in device)


def test_roof_share_is_computed_per_round():
    case = Case(depth=0, prompt=10, generate=11)
    # In each round, 10 tokens of 1 MB each take twice the time that memory takes at that round's bandwidth; the last
    # round has no bandwidth. From the medians, the share would be 41 %.
    own = Measurement(decode={case: [0.02, 0.005, 0.0125, 1.0]}, prefill={case: [1.0] * 4})
    found = Measurements([case], {"flownpu": own}, bandwidth=[1e9, 4e9, 1.6e9])
    machine = Machine("", "", 1, 1, "", "", {})
    report = BenchReport(machine, "model", {"threads": 1}, DecodeTraffic(10**6, (), {}, ()), found)
    assert [row[2] for row in report.rows()] == ["", "50 %"]


def test_roof_is_measured_around_first_engine(monkeypatch, peer):
    rates = iter([1e9, 3e9, 5e9, 6e9])
    monkeypatch.setattr("flownpu.bench.measurement.read_bandwidth", lambda _threads: next(rates))
    found = measure([peer("own"), peer()], [Case(0, 4, 2)], repeats=2, threads=1, vocabulary_size=9)
    assert found.bandwidth == [2e9, 5.5e9]


def test_busy_processes_compute_until_parent_ends():
    """They also end if the process that started them is killed, which runs no more code of its own."""
    script = (
        "import os\nfrom flownpu.bench.busy import busy_cores\nwith busy_cores(2) as started:\n"
        "    print(*(process.pid for process in started), flush=True)\n    os.kill(os.getpid(), 9)"
    )
    with busy_cores(1) as (process,):
        before = psutil.Process(process.pid).cpu_times().user
        wait_until(lambda: psutil.Process(process.pid).cpu_times().user > before + 0.1)
    assert process.returncode == -signal.SIGKILL
    done = subprocess.run([os.sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    first, second = map(int, done.stdout.split())
    wait_until(lambda: not psutil.pid_exists(first) and not psutil.pid_exists(second))


def test_bench_beside_busy_core_reports_roof_of_other_cores(flownpu, model, monkeypatch):
    readers = []
    monkeypatch.setattr("flownpu.bench.measurement.read_bandwidth", lambda threads: readers.append(threads) or 1e9)
    done = flownpu("bench", model, *SMALL, "--threads", 2, "--busy", 1, *CPU)
    assert readers == [1, 1]
    assert "Memory read roof, 1 threads beside 1 busy processes: 1.0 GB/s" in done.out


def test_bench_writes_the_table_and_its_files(flownpu, model, tmp_path):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "markdown")}
    done = flownpu(
        "bench", model, *SMALL, *CPU, *(part for kind, path in files.items() for part in (f"--{kind}", path))
    )
    assert done.code == 0
    for text in ("prefill 40", "decode at 40", "load, s", "of roof", "Memory read roof"):
        assert text in done.out
        assert text in files["markdown"].read_text()
    assert json.loads(files["json"].read_text())["engines"]["flownpu"]["cases"][0]["runs"] == 1


@pytest.mark.parametrize("limit", [2048])
def test_bench_prompt_longer_than_context_is_refused(flownpu, model, limit):
    done = flownpu("bench", model, "--prompt", limit, "--generate", 2, *CPU)
    assert done.code == 1
    assert f"2048 prompt tokens and 2 new ones do not fit the model's context of {limit}" in done.err


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--prompt", "40,x", "expected numbers from 1 with commas between, got '40,x'"),
        ("--depth", "-1", "expected numbers from 0"),
    ],
)
def test_bench_with_unknown_values_is_refused(flownpu, model, option, value, expected):
    done = flownpu("bench", model, option, value)
    assert done.code == 2
    assert expected in done.err


def test_engine_error_ends_bench(flownpu, model):
    done = flownpu("bench", model, *SMALL, "--option", "cpu_isa=mmx")
    assert done.code == 1
    assert "cpu_isa" in done.err
    assert "mmx" in done.err


def test_end_of_text_does_not_end_measurement(flownpu, model_copy):
    # All tokens end the text: without a minimum length the reply would be one token long.
    config = json.loads((model_copy / "genai_config.json").read_text())
    config["model"]["eos_token_id"] = list(range(4000))
    (model_copy / "genai_config.json").write_text(json.dumps(config))
    report = json.loads(flownpu("bench", model_copy, *SMALL, "--json", "-", *CPU).out)
    assert report["engines"]["flownpu"]["cases"][0]["decode_rate"]["median"] > 0


def test_measure_runs_engines_in_turn(peer):
    cases, heard = [Case(0, 20, 6), Case(30, 20, 6)], []
    engines = [peer("a"), peer("b")]
    found = measure(engines, cases, repeats=2, threads=1, vocabulary_size=9, progress=lambda *call: heard.append(call))
    order = [name for name, *_ in heard]
    assert [name for i, name in enumerate(order) if name != order[i - 1]] == ["memory", "a", "b", "memory", "a", "b"]
    assert heard[-1] == ("b", 8, 8)
    for measured in found.engines.values():
        assert measured.version == "peer 1.0"
        assert len(measured.load) == len(measured.memory_peak) == 2
        for case in cases:
            # The engine sleeps 1 ms a token and 4 ms a step, never less.
            assert 0 < measured.prefill_rate(case).maximum <= 1000
            assert 0 < measured.decode_rate(case).maximum <= 250
            # Five of the six new tokens: the first comes with the prompt.
            assert min(measured.decode[case]) >= 5 * 0.004


def test_failing_peer_is_left_out(peer):
    found = measure(
        [peer("own"), peer("refuses", "refuses"), peer("dies", "dies")],
        [Case(0, 4, 3)],
        repeats=2,
        threads=1,
        vocabulary_size=9,
    )
    assert found.failures["refuses"] == "the model has no weights"
    assert found.failures["dies"].startswith("dies ended with exit code 3")
    assert len(found.engines["own"].load) == 2


def test_failing_first_engine_ends_bench(peer):
    with pytest.raises(FlowNPUError, match=r"^the model has no weights$"):
        measure([peer(mood="refuses")], [Case(0, 4, 3)], repeats=1, threads=1, vocabulary_size=9)


def test_measure_interrupted_keeps_finished_runs(peer):
    def interrupt(name: str, done: int, total: int) -> None:
        if (name, done, total) == ("b", 1, 4):
            os.kill(os.getpid(), signal.SIGINT)

    found = measure(
        [peer("a"), peer("b", "sleeps")], [Case(0, 4, 3)], repeats=2, threads=1, vocabulary_size=9, progress=interrupt
    )
    assert found.interrupted
    assert len(found.engines["a"].decode[Case(0, 4, 3)]) == 1
    assert found.engines["b"].decode == {}


def test_ctrl_c_ends_command_and_its_processes(start, model, tmp_path):
    process = start("bench", model, *SMALL, "--repeats", 500, *CPU, "--markdown", tmp_path / "runs.md")
    deadline = time.monotonic() + 60
    while not (children := child_processes(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert children
    assert process.returncode == 130
    assert not child_processes(process.pid)
    if (tmp_path / "runs.md").exists():
        assert "Interrupted" in out


def child_processes(pid: int) -> list[str]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return path.read_text().split() if path.exists() else []

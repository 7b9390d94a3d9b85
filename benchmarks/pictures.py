# SPDX-License-Identifier: Apache-2.0
"""Times the networks of Stable Diffusion 1.4, with random weights, beside other engines on the CPU.

    python -m tests.imagine.environment benchmarks.pictures export out/sd14
    python -m benchmarks.pictures out/sd14 flownpu/bf16 flownpu/int8 onnxruntime
    pip install openvino==2026.4.1 nncf==3.4.0
    python -m benchmarks.pictures out/sd14 openvino/bf16 openvino/int8
    python -m benchmarks.pictures out/sd14 memory
    python -m benchmarks.pictures convolutions

runs at the root of the repository. Each engine computes, in a process of its own, a denoising step of a picture of 512
x 512 pixels (with guidance: a batch of 2), the decoder's picture and, with --picture, a whole picture of 20 steps.
--size=768x512 and --steps=1 change that. "arena" is how much private memory the first run took. Errors are beside ONNX
Runtime in float32, if that has run with the same size. `memory` prints what the results of all steps take and what the
plan holds them in. The last command times convolutions of the UNet by themselves, beside the machine's rate of bf16.
With --device=gpu FlowNPU computes there.

    pip install openvino-genai==2026.4.1.0 nncf==3.4.0 transformers
    python -m benchmarks.pictures out/sd14 openvino-genai/bf16 openvino-genai/int8
    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary :all: stable-diffusion-cpp-python==0.4.7
    python -m benchmarks.pictures out/sd14 stable-diffusion.cpp/f16 stable-diffusion.cpp/q8_0

makes whole pictures only, by programs of their own. OpenVINO's form of the networks, in float16 or int8, is written
first, into out/sd14-openvino-bf16 and -int8; stable-diffusion.cpp reads out/sd14-checkpoint.
"""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

Network = Callable[[dict[str, Any]], Any]
_GUIDANCE, _REPEATS = 7.5, 3
_OPTIONS = dict(option.partition("=")[::2] for option in sys.argv if option.startswith("--"))
_STEPS = int(_OPTIONS.get("--steps", 20))
_WIDTH, _HEIGHT = (int(side) for side in _OPTIONS.get("--size", "512x512").split("x"))
_DEVICE = _OPTIONS.get("--device", "cpu")
_LATENTS = (4, _HEIGHT // 8, _WIDTH // 8)


def export(folder: Path) -> None:
    """Writes the pipeline as optimum exports it, and beside it the checkpoint, in float16."""
    import diffusers
    import torch
    import transformers
    from optimum.exporters.onnx import main_export

    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    tokenizer = Path(__file__).parents[1] / "tests/fixtures/shapes-diffusion/tokenizer"
    pipeline = diffusers.StableDiffusionPipeline(
        unet=diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768),
        vae=diffusers.AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), layers_per_block=2, sample_size=512, **blocks
        ),
        text_encoder=transformers.CLIPTextModel(transformers.CLIPTextConfig(**text)),
        tokenizer=transformers.CLIPTokenizer.from_pretrained(tokenizer, model_max_length=77),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
    )
    checkpoint = folder.with_name(folder.name + "-checkpoint")
    pipeline.to(torch.float16).save_pretrained(checkpoint)
    del pipeline
    main_export(str(checkpoint), str(folder), task="text-to-image", do_validation=False)


# --- Engines: each opens a network's file -----------------------------------------------------------------------------


def _onnxruntime(path: Path, _: str) -> Network:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda given: session.run(None, given)[0]


def _flownpu(path: Path, activations: str) -> Network:
    import onnxruntime

    from flownpu.model.session import open_session

    session, placement = open_session(
        onnxruntime, path, "flownpu", {"device": _DEVICE, "activations": activations, "on_unsupported": "error"}, None
    )
    print(f"{path.parent.name}: {placement}", file=sys.stderr)
    return lambda given: session.run(None, given)[0]


def _openvino(path: Path, precision: str) -> Network:
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    if precision == "int8":
        import nncf

        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32" if precision == "f32" else "bf16"})
    return lambda given: compiled(given)[0]


ENGINES = {"onnxruntime": _onnxruntime, "flownpu": _flownpu, "openvino": _openvino}


# --- Engines that make whole pictures: each opens the pipeline --------------------------------------------------------


def _openvino_genai(folder: Path, precision: str) -> Callable[[], Any]:
    import openvino_genai

    networks = folder.with_name(f"{folder.name}-openvino-{precision}")
    if not networks.exists():
        # In a process of its own, whose memory is not the engine's.
        command = [sys.executable, "-m", "benchmarks.pictures", str(folder), "openvino-form", precision]
        subprocess.run(command, check=True, stdout=sys.stderr)
    pipeline = openvino_genai.Text2ImagePipeline(networks, "CPU", INFERENCE_PRECISION_HINT="bf16")
    return lambda: (
        pipeline.generate(
            "a red circle", width=_WIDTH, height=_HEIGHT, num_inference_steps=_STEPS, guidance_scale=_GUIDANCE
        ).data
    )


def openvino_form(folder: Path, precision: str) -> None:
    """Writes the networks in OpenVINO's form."""
    import nncf
    import openvino
    import openvino_tokenizers
    import transformers

    networks = folder.with_name(f"{folder.name}-openvino-{precision}")
    shutil.copytree(folder, networks, ignore=shutil.ignore_patterns("*.onnx*", "vae_encoder"))
    for part in ("text_encoder", "unet", "vae_decoder"):
        model = openvino.Core().read_model(folder / part / "model.onnx")
        if part == "unet":
            _take_steps_as_integers(model)
        if precision == "int8":
            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        openvino.save_model(model, networks / part / "openvino_model.xml")
    tokenizer = transformers.CLIPTokenizerFast.from_pretrained(folder / "tokenizer")
    openvino.save_model(openvino_tokenizers.convert_tokenizer(tokenizer), networks / "tokenizer/openvino_tokenizer.xml")


def _take_steps_as_integers(model: Any) -> None:
    """GenAI gives the time as an int64 in a vector, for which OpenVINO's own exporter makes the input."""
    from openvino import Type, opset13

    scalar = model.input("timestep").get_node()
    vector = opset13.parameter([1], Type.i64, "timestep")
    number = opset13.convert(opset13.squeeze(vector, opset13.constant(0)), scalar.get_element_type().to_string())
    scalar.output(0).replace(number.output(0))
    scalar.output(0).set_names(set())
    vector.output(0).set_names({"timestep"})
    model.remove_parameter(scalar)
    model.add_parameters([vector])
    model.validate_nodes_and_infer_types()


def _stable_diffusion_cpp(folder: Path, weights: str) -> Callable[[], Any]:
    import stable_diffusion_cpp

    pipeline = stable_diffusion_cpp.StableDiffusion(
        model_path=str(folder.with_name(folder.name + "-checkpoint")), wtype=weights, diffusion_flash_attn=True
    )
    return lambda: pipeline.generate_image(
        "a red circle", width=_WIDTH, height=_HEIGHT, sample_steps=_STEPS, cfg_scale=_GUIDANCE, sample_method="euler"
    )[0]


PIPELINES = {"openvino-genai": _openvino_genai, "stable-diffusion.cpp": _stable_diffusion_cpp}


# --- One engine, in a process of its own ------------------------------------------------------------------------------


def _seconds(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPEATS):
        started = perf_counter()
        call()
        times.append(perf_counter() - started)
    return min(times)


def _private_bytes() -> int:
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def _result(folder: Path, engine: str, part: str) -> Path:
    return folder / f"{engine.replace('/', '-')}-{part}-{_WIDTH}x{_HEIGHT}.npy"


def _peak() -> float:
    return getrusage(RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _kind(folder: Path, part: str, port: str) -> Any:
    """The type of a network's input."""
    import onnx

    graph = onnx.load(folder / part / "model.onnx", load_external_data=False).graph
    kind = next(one for one in graph.input if one.name == port).type.tensor_type.elem_type
    return onnx.helper.tensor_dtype_to_np_dtype(kind)


def _inputs(folder: Path) -> dict[str, dict[str, Any]]:
    random = np.random.default_rng(1)
    tokens = random.integers(0, 900, (2, 77)).astype(_kind(folder, "text_encoder", "input_ids"))
    return {
        "text_encoder": {"input_ids": tokens},
        "unet": {
            "sample": random.standard_normal((2, *_LATENTS), np.float32),
            "timestep": np.array(481, _kind(folder, "unet", "timestep")),
            "encoder_hidden_states": random.standard_normal((2, 77, 768), np.float32),
        },
        "vae_decoder": {"latent_sample": random.standard_normal((1, *_LATENTS), np.float32)},
    }


def _picture(text: Network, denoise: Network, decode: Network, folder: Path) -> Any:
    """DDIM with guidance over 20 steps, as diffusers does it."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 1000, (2, 77)).astype(_kind(folder, "text_encoder", "input_ids"))
    states = text({"input_ids": tokens})
    kept = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    time = _kind(folder, "unet", "timestep")
    x = random.standard_normal((1, *_LATENTS), np.float32)
    for step in range(_STEPS, 0, -1):
        at = (step - 1) * 1000 // _STEPS
        both = denoise({"sample": np.repeat(x, 2, 0), "timestep": np.array(at, time), "encoder_hidden_states": states})
        noise = both[:1] + _GUIDANCE * (both[1:] - both[:1])
        before = kept[(step - 2) * 1000 // _STEPS] if step > 1 else 1.0
        clean = (x - (1 - kept[at]) ** 0.5 * noise) / kept[at] ** 0.5
        x = (before**0.5 * clean + (1 - before) ** 0.5 * noise).astype(np.float32)
    return decode({"latent_sample": x / 0.18215})


def measure(folder: Path, engine: str) -> dict[str, float]:
    """Seconds of each part, and the peak of resident memory; results are kept for comparison."""
    name, _, precision = engine.partition("/")
    if name in PIPELINES:
        started = perf_counter()
        make = PIPELINES[name](folder, precision)
        opened = perf_counter()
        make()
        return {"load": opened - started, "picture": perf_counter() - opened, "peak GB": _peak()}
    paths = {part: folder / part / "model.onnx" for part in ("text_encoder", "unet", "vae_decoder")}
    started = perf_counter()
    networks = {part: ENGINES[name](path, precision) for part, path in paths.items()}
    found = {"load": perf_counter() - started}
    for part, values in _inputs(folder).items():
        before = _private_bytes()
        np.save(_result(folder, engine, part), networks[part](values))
        found[f"{part} arena GB"] = (_private_bytes() - before) / 1e9
        found[part] = _seconds(lambda part=part, values=values: networks[part](values))  # type: ignore[misc]
    if "--picture" in _OPTIONS:
        started = perf_counter()
        text, denoise, decode = networks.values()
        _picture(text, denoise, decode, folder)
        found["picture"] = perf_counter() - started
    return {**found, "peak GB": _peak()}


def memory(folder: Path) -> None:
    """Prints what the results of FlowNPU's steps take in float32, and the plan's slots that hold them in turn.

    "at least" is what is needed at once, which a session's first run holds.
    """
    import onnxruntime

    import flownpu

    flownpu.register()
    devices = [one for one in onnxruntime.get_ep_devices() if one.ep_name == flownpu.get_ep_name()][:1]
    for part, given in _inputs(folder).items():
        with TemporaryDirectory() as scratch:
            options = onnxruntime.SessionOptions()
            options.enable_profiling, options.profile_file_prefix = True, f"{scratch}/{part}"
            options.add_provider_for_devices(devices, {"device": _DEVICE, "on_unsupported": "error"})
            session = onnxruntime.InferenceSession(folder / part / "model.onnx", options)
            for _ in range(2):
                session.run(None, given)
            events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
        steps = [event["args"] for event in events if "bytes_held" in event.get("args", {})]
        first, second = steps[: len(steps) // 2], steps[len(steps) // 2 :]
        results = sum(4 * math.prod(shape) for step in first for shape in step["output_shapes"])
        held = [max(int(step["bytes_held"]) for step in run) for run in (first, second)]
        print(
            f"{part}: results of {len(first)} steps {results / 1e6:.0f} MB, at least {held[0] / 1e6:.0f} MB, "
            f"the plan {held[1] / 1e6:.0f} MB; in 16 bits half",
            flush=True,
        )


def convolutions() -> None:
    """Prints the time of each size's 3 x 3 convolution, and its multiply-adds beside those of the roof."""
    from benchmarks.machine.roofs import measure_roofs
    from flownpu.machine import usable_cores
    from tests.ops.device import Node

    roof = measure_roofs(usable_cores()).bf16_dot / 2
    random = np.random.default_rng(0)
    for channels, side in ((320, 64), (640, 32), (1280, 16), (1280, 8)):
        x = random.standard_normal((2, channels, side, side), np.float32)
        weight = random.standard_normal((channels, channels, 3, 3), np.float32)
        node = Node("Conv", [x, weight], domain="", constants=(1,), pads=[1, 1, 1, 1])
        run = node.bound([x, weight], [np.empty_like(x)])
        seconds = min(_seconds(run) for _ in range(_REPEATS))
        rate = x.size * channels * 9 / seconds
        print(
            f"{channels} channels, {side} x {side}: {seconds * 1e3:.2f} ms, {rate / 1e9:.0f} GMAC/s, {rate / roof:.0%}"
        )


def main(folder: Path, engines: list[str]) -> None:
    """Prints each engine's seconds, memory and errors."""
    options = [option for option in sys.argv if option.startswith("--")]
    for engine in engines:
        command = [sys.executable, "-m", "benchmarks.pictures", str(folder), "measure", engine, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        for part in ("unet", "vae_decoder"):
            made, reference = (_result(folder, name, part) for name in (engine, "onnxruntime"))
            if made != reference and made.exists() and reference.exists():
                expected = np.load(reference)
                error = np.load(made) - expected
                found[f"{part} dB"] = float(20 * np.log10(np.ptp(expected)) - 10 * np.log10(np.square(error).mean()))
        print(f"{engine:<16}" + "  ".join(f"{key} {value:.2f}" for key, value in found.items()), flush=True)


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    if names[0] == "convolutions":
        convolutions()
    elif names[1:] == ["memory"]:
        memory(Path(names[0]))
    elif names[0] == "export":
        export(Path(names[1]))
    elif names[1] == "openvino-form":
        openvino_form(Path(names[0]), names[2])
    elif names[1] == "measure":
        print(json.dumps(measure(Path(names[0]), names[2])))
    else:
        main(Path(names[0]), names[1:])

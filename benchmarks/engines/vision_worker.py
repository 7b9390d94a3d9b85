# SPDX-License-Identifier: Apache-2.0
"""Runs in an engine's own environment: times from a picture to the first token, as often as it is asked.

    python vision_worker.py flownpu|ort-cpu|openvino FOLDER THREADS

Each line on stdin asks for one measurement; each answer is a JSON object on stdout, {"seconds"}. Before them, when the
model is loaded, comes {"load_seconds"}; at the end of stdin {"peak"}, the most bytes that were resident.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_PROMPT = "What is this?"
_TOKENS_PER_IMAGE = 256


def _picture() -> Any:
    return np.random.default_rng(0).integers(0, 256, (896, 896, 3), dtype=np.uint8)


def _genai(folder: Path, provider: str, threads: int) -> Callable[[], None]:
    """A run of ORT GenAI, on FlowNPU's provider or ONNX Runtime's."""
    import io  # noqa: PLC0415

    import onnxruntime_genai as genai  # noqa: PLC0415 each engine's environment has its own
    from PIL import Image  # noqa: PLC0415

    config = genai.Config(str(folder))
    config.clear_providers()
    if provider == "flownpu":
        import flownpu  # noqa: PLC0415

        flownpu.register()
        config.append_provider(flownpu.get_ep_name())
        config.set_provider_option(flownpu.get_ep_name(), "threads", str(threads))
    else:
        options = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": dict.fromkeys(("vision", "embedding", "decoder"), options)}))
    model = genai.Model(config)
    processor = model.create_multimodal_processor()
    tokenizer = genai.Tokenizer(model)
    soft = "<image_soft_token>" * _TOKENS_PER_IMAGE
    tokens = tokenizer.encode(f"\n\n<start_of_image>{soft}<end_of_image>\n\n{_PROMPT}")
    encoded = io.BytesIO()
    Image.fromarray(_picture()).save(encoded, "PNG", compress_level=0)

    def run() -> None:
        inputs = processor("", images=genai.Images.open_bytes(encoded.getvalue()))
        inputs["input_ids"] = np.asarray(tokens, np.int32)[np.newaxis]
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(max_length=len(tokens) + 1, do_sample=False)
        generator = genai.Generator(model, parameters)
        generator.set_inputs(inputs)
        generator.generate_next_token()

    return run


def _openvino(folder: Path, threads: int) -> Callable[[], None]:
    """A run of OpenVINO GenAI's vision-language pipeline, on a model that optimum-intel exported."""
    import openvino  # noqa: PLC0415
    import openvino_genai  # noqa: PLC0415

    pipeline = openvino_genai.VLMPipeline(str(folder), "CPU", INFERENCE_NUM_THREADS=threads)
    picture = openvino.Tensor(_picture()[np.newaxis])

    def run() -> None:
        pipeline.generate(_PROMPT, images=[picture], max_new_tokens=1, do_sample=False)

    return run


def main() -> None:
    """Loads the engine and answers stdin."""
    engine, folder, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to stderr, because stdout has answers only

    def say(**answer: float) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    started = time.perf_counter()
    run = _openvino(folder, threads) if engine == "openvino" else _genai(folder, engine, threads)
    say(load_seconds=time.perf_counter() - started)
    for _ in sys.stdin:
        started = time.perf_counter()
        run()
        say(seconds=time.perf_counter() - started)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    say(peak=int(status["VmHWM"].split()[0]) * 1024)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Runs pipelines of diffusers and of optimum in the environment that `environment.py` makes.

This file is also the script that runs there: each task of a list in turn, in one process, whose imports take seconds.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.imagine import environment

CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "shapes-diffusion"
ROOT = Path(__file__).parents[2]


def run(*tasks: dict[str, Any]) -> list[Any]:
    """The results of tasks, each a function's name and its arguments.

    Raises:
        FlowNPUError: the environment cannot be made.
        RuntimeError: a task failed; with the end of what the process printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = str(Path(folder) / "results.json")
        command = [str(environment.python()), "-m", "tests.imagine.pipelines", json.dumps(tasks, default=str), results]
        variables = {**os.environ, **environment.VARIABLES}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"diffusers' environment failed:\n{(done.stdout + done.stderr)[-3000:]}")
        found: list[Any] = json.loads(Path(results).read_text())
        return found


# --- In the environment -----------------------------------------------------------------------------------------------


def export(checkpoint: str, output: str) -> None:
    """`optimum-cli export onnx --task text-to-image`, in this process."""
    from optimum.exporters.onnx import main_export

    main_export(checkpoint, output, task="text-to-image", do_validation=False)


def _flownpu(model: str, kind: str, options: dict[str, str]) -> Any:
    """optimum's own pipeline, whose provider is FlowNPU."""
    import optimum.onnxruntime

    import flownpu

    flownpu.register()
    made = getattr(optimum.onnxruntime, kind).from_pretrained(
        model, provider=flownpu.get_ep_name(), provider_options=options
    )
    made.set_progress_bar_config(disable=True)
    return made


def _torch(kind: str) -> Any:
    import diffusers
    import torch

    made = getattr(diffusers, kind).from_pretrained(CHECKPOINT, torch_dtype=torch.float32, safety_checker=None)
    made.set_progress_bar_config(disable=True)
    return made


def _signal_to_noise(found: Any, expected: Any) -> float:
    """The PSNR in dB; the peak is the range of what is expected."""
    import numpy as np

    error = np.square(found - expected).mean()
    return float(20 * np.log10(np.ptp(expected)) - 10 * np.log10(error)) if error else 999.0


def compare(
    model: str, kind: str, options: dict[str, str], schedulers: list[str], arguments: dict[str, Any]
) -> dict[str, list[float]]:
    """Denoises with torch and with FlowNPU from the same noise.

    Returns:
        For each scheduler the PSNRs of the latents after each step, and last of the picture.
    """
    import diffusers
    import numpy as np
    import torch
    from PIL import Image

    pictures = {"image", "mask_image"}
    given = {key: Image.open(value) if key in pictures else value for key, value in arguments.items()}
    pipelines = [_torch(kind), _flownpu(model, f"ORT{kind}", options)]
    found = {}
    for name in schedulers:
        runs = []
        for pipeline in pipelines:
            pipeline.scheduler = getattr(diffusers, name).from_config(pipeline.scheduler.config)
            seen: list[Any] = []

            def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any], seen: list[Any] = seen) -> dict[str, Any]:
                seen.append(tensors["latents"].clone().numpy())
                return tensors

            generator = torch.Generator().manual_seed(5)
            made = pipeline(generator=generator, callback_on_step_end=keep, output_type="np", **given)
            runs.append([*seen, np.asarray(made.images)])
        found[name] = [_signal_to_noise(ours, theirs) for theirs, ours in zip(*runs, strict=True)]
    return found


def draw(model: str, options: dict[str, str], names: list[str]) -> list[tuple[str, str]]:
    """Colour and shape of a picture of each name, made with FlowNPU."""
    import torch

    from tests.fixtures.shapes_drawings import GUIDANCE, read

    pipeline = _flownpu(model, "ORTStableDiffusionPipeline", options)
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(names))]
    return [
        read(picture)
        for picture in pipeline(names, num_inference_steps=20, guidance_scale=GUIDANCE, generator=generators).images
    ]


def command(arguments: list[str], event: str = "") -> dict[str, Any]:
    """A command of flownpu.

    Args:
        arguments: its command line.
        event: what happens after the first step: "interrupt" is Ctrl-C, "full disk" lets no file grow beyond 100 bytes.

    Returns:
        "code", and what it wrote to "err".
    """
    import contextlib
    import io
    import resource
    import signal

    from flownpu.cli import main
    from flownpu.imagine import ImageModel

    picture, limits = ImageModel.picture, resource.getrlimit(resource.RLIMIT_FSIZE)

    def disturbed(self: Any, request: Any, advance: Any) -> Any:
        def advance_disturbed(done: int, total: int) -> None:
            advance(done, total)
            if event == "interrupt":
                signal.raise_signal(signal.SIGINT)
            elif event == "full disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))

        return picture(self, request, advance_disturbed)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    errors = io.StringIO()
    ImageModel.picture = disturbed  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stderr(errors):
            code = main(arguments)
    finally:
        ImageModel.picture = picture  # type: ignore[method-assign]
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return {"code": code, "err": errors.getvalue()}


if __name__ == "__main__":
    tasks = {each.__name__: each for each in (export, compare, draw, command)}
    asked = json.loads(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps([tasks[one.pop("task")](**one) for one in asked]))

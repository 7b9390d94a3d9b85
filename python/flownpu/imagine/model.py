# SPDX-License-Identifier: Apache-2.0
"""Makes pictures with a pipeline of diffusers, whose networks are graphs in ONNX Runtime."""

from __future__ import annotations

import inspect
import time
import warnings
from typing import TYPE_CHECKING, Any

from flownpu.errors import FlowNPUError, check_text, require
from flownpu.imagine.request import CLASSES
from flownpu.model.folder import check_pipeline_folder
from flownpu.model.session import open_session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from PIL.Image import Image

    from flownpu.imagine.request import PictureRequest

# The networks that optimum's pipelines load.
_PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "unet", "transformer", "vae_encoder", "vae_decoder")
# Exports have nodes that not every device takes; the placements say which.
_DEFAULTS = {"on_unsupported": "cpu"}
# diffusers' pipelines ask for multiples of 8, whatever the autoencoder's factor is.
_MULTIPLE = 8


class ImageModel:
    """A folder with model_index.json and the graphs that `optimum-cli export onnx` made of a pipeline of diffusers.

    Args:
        folder: the folder.
        provider: "flownpu", or "cpu" for ONNX Runtime's own CPU provider.
        options: options of FlowNPU's provider by key; `on_unsupported` is "cpu" unless it is given.
        threads: threads of the CPU kernels; None leaves the number to the provider.

    Attributes:
        placement: a line for each network, which says which of its nodes run where.
        load_seconds: how long opening the model took.
        size: width and height in pixels that the model was trained with.

    Raises:
        FlowNPUError: the folder holds no exported pipeline, or FlowNPU's options are given to another provider.
        MissingDependencyError: a package of the extra `imagine` is not installed.
        RuntimeError: ONNX Runtime or the provider refuses a graph or an option; the message is theirs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        provider: str = "flownpu",
        options: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> None:
        check_pipeline_folder(folder)
        self.folder = folder
        started = time.perf_counter()
        self._diffusers, self._torch, _, onnxruntime, optimum = (
            require(module, extra="imagine", purpose="Making pictures")
            for module in ("diffusers", "torch", "transformers", "onnxruntime", "optimum.onnxruntime")
        )
        # Warnings that do not concern the user: what optimum reads of diffusers, and that it loads no safety checker.
        warnings.filterwarnings("ignore", category=FutureWarning, module="diffusers")
        self._diffusers.utils.logging.set_verbosity_error()
        given = {**(_DEFAULTS if provider == "flownpu" else {}), **(options or {})}
        sessions, placements = {}, []
        for part in _PARTS:
            graph = folder / part / "model.onnx"
            if graph.is_file():
                sessions[f"{part}_session"], placement = open_session(onnxruntime, graph, provider, given, threads)
                placements.append(f"{part}: {placement}")
        self.placement = "\n".join(placements)
        self._pipeline: Any = optimum.ORTDiffusionPipeline.from_pretrained(folder, **sessions)
        self._pipeline.set_progress_bar_config(disable=True)
        self._own_scheduler = self._pipeline.scheduler
        network = self._pipeline.unet or self._pipeline.transformer
        latents = getattr(network.config, "sample_size", None) or self._pipeline.default_sample_size
        side = latents * self._pipeline.vae_scale_factor
        self.size = (side, side)
        self.load_seconds = time.perf_counter() - started

    def picture(self, request: PictureRequest, advance: Callable[[int, int], None] = lambda *_: None) -> Image:
        """Makes one picture; the same request gives the same picture.

        Args:
            request: what to make.
            advance: called after each step with the number of steps done, and of all; what it raises ends the picture.

        Raises:
            FlowNPUError: a text is longer than the model takes or not UTF-8, or the model takes no picture of that
                size, no negative prompt, or not the scheduler.
        """
        pipeline = self._pipeline
        width, height = request.size or self.size
        if width % _MULTIPLE or height % _MULTIPLE:
            raise FlowNPUError(f"expected a width and a height that are multiples of {_MULTIPLE}, got {width}x{height}")
        for text in (request.prompt, request.negative):
            self._check_length(text)
        takes = inspect.signature(pipeline.__call__).parameters
        if request.negative and "negative_prompt" not in takes:
            raise FlowNPUError(f"{self.folder}: {type(pipeline).__name__} takes no negative prompt: leave it out")
        negative = {"negative_prompt": request.negative} if request.negative else {}
        pipeline.scheduler = self._scheduler(request)

        def stepped(running: Any, index: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            advance(index + 1, running.num_timesteps)
            return tensors

        made = pipeline(
            request.prompt,
            width=width,
            height=height,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            generator=self._torch.Generator().manual_seed(request.seed),
            callback_on_step_end=stepped,
            **negative,
        )
        picture: Image = made.images[0]
        return picture

    def _scheduler(self, request: PictureRequest) -> Any:
        """A scheduler in its first state: some remember earlier steps, also of a picture that was given up."""
        kind = type(self._own_scheduler)
        if request.scheduler is not None:
            kind = getattr(self._diffusers, CLASSES[request.scheduler])
        return kind.from_config(self._own_scheduler.config)

    def _check_length(self, text: str) -> None:
        """Refuses a text that no tokenizer reads whole: of several, one for long texts may be beside CLIP's."""
        check_text(text)
        names = ("tokenizer", "tokenizer_2", "tokenizer_3")
        tokenizers = [one for name in names if (one := getattr(self._pipeline, name, None)) is not None]
        longest = max(tokenizers, key=lambda one: one.model_max_length)
        tokens = len(longest(text, verbose=False).input_ids)
        if tokens > longest.model_max_length:
            raise FlowNPUError(
                f"a text has {tokens} tokens, and the model reads {longest.model_max_length} at most: shorten it"
            )

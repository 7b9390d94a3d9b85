# SPDX-License-Identifier: Apache-2.0
"""Images in a prompt: their places, and their way to ORT GenAI's generator.

This is for the models that GenAI calls gemma3. In a conversation an image is a part of a turn, as in transformers.
Gemma's chat template marks its place with `IMAGE`, and so does a prompt that is given as text. Each mark becomes the
tokens that transformers' Gemma3Processor and GenAI's processor write there. The vision model's features replace the
embeddings of `TOKENS_PER_IMAGE` of these tokens.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flownpu.errors import FlowNPUError, require
from flownpu.generate.turns import IMAGE, Content
from flownpu.model.folder import read_genai_config, read_json

if TYPE_CHECKING:
    from flownpu.generate.images import ImageSize, PreparedImage
    from flownpu.generate.tokenizer import Tokenizer

SOFT = "<image_soft_token>"
TOKENS_PER_IMAGE = 256
"""The fixed number in GenAI's gemma_image_processor.cpp."""

# Pillow's names of interpolations, which transformers uses, by those of GenAI's processor.
INTERPOLATIONS = {"NEAREST": "NEAREST", "LINEAR": "BILINEAR", "CUBIC": "BICUBIC", "LANCZOS": "LANCZOS"}


def read_images(folder: Path, paths: Iterable[Path]) -> "list[PreparedImage]":
    """Reads image files as the model in `folder` takes them, without opening the model.

    Raises:
        FlowNPUError: the folder holds no model, or one that takes no images; or an image cannot be read.
        MissingDependencyError: Pillow is not installed.
    """
    size = image_size(folder)
    images = require("flownpu.generate.images", extra="genai", purpose="Reading images")
    return [images.read_image(path, size) for path in paths]


def read_image_data(folder: Path, contents: Mapping[str, bytes]) -> "list[PreparedImage]":
    """Like `read_images`, for files in memory; `contents` has them by the names that errors call them."""
    size = image_size(folder)
    images = require("flownpu.generate.images", extra="genai", purpose="Reading images")
    return [images.read_image(Path(name), size, content) for name, content in contents.items()]


def image_size(folder: Path) -> "ImageSize":
    """The size to which the folder's processor resizes images.

    Raises:
        FlowNPUError: the folder holds no model that takes images, or says nothing of their size.
    """
    model = read_genai_config(folder)["model"]
    vision = model.get("vision")
    if not isinstance(vision, dict):
        raise FlowNPUError(
            f"the model in {folder} takes no images: its genai_config.json names no vision model. `flownpu convert` of "
            "a checkpoint with a vision tower (Gemma3ForConditionalGeneration) makes one that does"
        )
    if model.get("type") != "gemma3":
        raise FlowNPUError(f'expected a model of type "gemma3" for images, {folder} holds one of "{model.get("type")}"')
    path = folder / str(vision.get("config_filename", "processor_config.json"))
    if not path.is_file():
        raise FlowNPUError(f"{folder} lacks {path.name}, which says how images are resized: convert the model again")
    images = require("flownpu.generate.images", extra="genai", purpose="Reading images")
    try:
        operations = [item["operation"] for item in read_json(path)["processor"]["transforms"]]
        resize = next(operation["attrs"] for operation in operations if operation["type"] == "Resize")
        # CUBIC is GenAI's default.
        interpolation = INTERPOLATIONS[resize.get("interpolation", "CUBIC")]
        size: ImageSize = images.ImageSize(int(resize["width"]), int(resize["height"]), interpolation)
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise FlowNPUError(
            f"{path} names no Resize of a width, a height and an interpolation: convert the model again"
        ) from error
    return size


def place_images(text: str, count: int) -> Content:
    """The content of a user's turn with images: they stand where the text has marks, or before the text.

    Without images a mark is text like any other.

    Raises:
        FlowNPUError: the text has marks, but their number is not `count`.
    """
    if count == 0:
        return text
    image = {"type": "image"}
    first, *others = [{"type": "text", "text": part} for part in text.split(IMAGE)]
    if not others:
        return [*[image] * count, first]
    if len(others) != count:
        raise FlowNPUError(
            f"the text has {len(others)} places for images ({IMAGE}), and {count} images were given: mark a place for "
            "each, or none, and they stand before the text"
        )
    return [first, *(part for other in others for part in (image, other))]


def expand_images(text: str) -> str:
    """A prompt's text with the texts of an image's tokens in place of each mark."""
    return text.replace(IMAGE, f"\n\n{IMAGE}{SOFT * TOKENS_PER_IMAGE}<end_of_image>\n\n")


class ImageProcessor:
    """Gives prompts with images to the generators of one model.

    Args:
        genai: the module onnxruntime_genai.
        model: its Model, of type gemma3 with a vision model.
        tokenizer: the folder's.
        features: name of the vision model's output in genai_config.json.
    """

    def __init__(self, genai: Any, model: Any, tokenizer: "Tokenizer", features: str) -> None:
        self._genai = genai
        self._processor = model.create_multimodal_processor()
        self._soft_token = tokenizer.token(SOFT)
        self._features = features

    def append(self, generator: Any, tokens: NDArray[np.int32], images: "Sequence[PreparedImage]") -> float | None:
        """Computes a prompt; with images it must be the generator's first.

        Args:
            generator: GenAI's generator. GenAI 0.18 drops the vision model when it has computed a prompt, and would
                silently ignore images that come later.
            tokens: the prompt, with its marks expanded.
            images: one for each mark.

        Returns:
            The seconds until the images' features were computed, including the decoding of the images; 0 without
            images; None if GenAI did not tell.

        Raises:
            FlowNPUError: the number of image tokens in the prompt is not that of its images.
        """
        self._check(tokens, images)
        if not images:
            generator.append_tokens(tokens)
            return 0.0
        started = time.perf_counter()
        inputs = self._processor("", images=self._genai.Images.open_bytes(*(image.png for image in images)))
        inputs["input_ids"] = tokens[np.newaxis]
        log = self._set_inputs(generator, inputs)
        return next((moment - started for text, moment in log.items() if self._features in text), None)

    def count_tokens(self, tokens: NDArray[np.int32]) -> int:
        """How many of the tokens stand for parts of images."""
        return int((tokens == self._soft_token).sum())

    def _check(self, tokens: NDArray[np.int32], images: "Sequence[PreparedImage]") -> None:
        found, expected = self.count_tokens(tokens), TOKENS_PER_IMAGE * len(images)
        if found != expected:
            raise FlowNPUError(
                f"the prompt has {found} tokens {SOFT}, expected {expected} for its {len(images)} images: they are "
                f"written for the marks {IMAGE}; leave them out of the text, and let the chat template keep the marks"
            )

    def _set_inputs(self, generator: Any, inputs: Any) -> dict[str, float]:
        """Computes a prompt; returns the lines of GenAI's log, each with its time by time.perf_counter().

        GenAI runs the vision model, the embedding model and the decoder in one call, and logs names and shapes of a
        model's outputs when the model is done.
        """
        # The callback is a method written in C. In a Python function Ctrl-C would raise KeyboardInterrupt, which GenAI
        # would swallow.
        log: defaultdict[str, float] = defaultdict(time.perf_counter)
        self._genai.set_log_callback(log.__getitem__)
        self._genai.set_log_options(enabled=True, model_output_shapes=True)
        try:
            generator.set_inputs(inputs)
        finally:
            self._genai.set_log_options(enabled=False, model_output_shapes=False)
            self._genai.set_log_callback(None)
        return log

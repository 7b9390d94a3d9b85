# SPDX-License-Identifier: Apache-2.0
"""Readers of samples' files, for a worker: all functions to which a user can give such files.

A reader returns the messages of refusals, as a user would see them; none: all was read. An error of another type
is a finding, and is raised to the caller.
"""

import contextlib
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from flownpu.bench.roofline import decode_traffic
from flownpu.convert import convert
from flownpu.convert.export_q4nx import export_q4nx
from flownpu.errors import FlowNPUError
from flownpu.explain.overview import explain
from flownpu.generate.chat_template import ChatTemplate
from flownpu.generate.image_prompts import image_size
from flownpu.generate.images import ImageSize, read_image
from flownpu.model.folder import read_genai_config
from flownpu.model.integrity import damage
from flownpu.model.summary import summarize
from flownpu.npu.artifacts import build_artifacts
from flownpu.npu.layers import read_decoder, read_encoder
from flownpu.ops import q4nx_file
from flownpu.verify.comparison import is_made_of
from tests.decoding import DecoderSession

# Memory that a reader may take in addition to the process's: samples are far below a megabyte.
MEMORY_BYTES = 2 << 30


def read(reader: str, folder: str) -> list[str]:
    """Reads the files of a sample; returns the messages of refusals."""
    with _within_memory():
        return READERS[reader](Path(folder))


@contextlib.contextmanager
def _within_memory() -> Iterator[None]:
    """Limits the process's address space, unless a sanitizer has reserved most of it."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    used = pages * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limited = used < 1 << 40
    if limited:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard))
    try:
        yield
    finally:
        if limited:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _refused(*steps: Callable[[], object], errors: tuple[type[Exception], ...] = ()) -> list[str]:
    """Runs each step; returns the messages of those that raise FlowNPUError or one of `errors`."""
    found = []
    for step in steps:
        try:
            step()
        except (FlowNPUError, *errors) as error:
            found.append(str(error))
    return found


@cache
def _devices() -> list[Any]:
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == "FlowNPUExecutionProvider"][:1]


def _of_session(make: Callable[[], Any], run: Callable[[Any], object]) -> list[str]:
    """The message with which the provider refuses to make a session, as an error of ONNX Runtime.

    A run may fail, too; its error names a node, and need not name a file.
    """
    try:
        session = make()
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        return [str(error)]
    try:
        run(session)
    except Exception as error:
        if not re.search(r"FlowNPUExecutionProvider_.* Status Message: ", str(error)):
            raise
    return []


def _source(folder: Path) -> list[str]:
    """Reads a source of `flownpu convert`."""
    output = folder.with_name(folder.name + "-out")
    gguf = folder / "model.gguf"
    found = _refused(lambda: convert(gguf if gguf.exists() else folder, output, force=True))
    shutil.rmtree(output, ignore_errors=True)
    return found


def _genai(folder: Path) -> list[str]:
    steps = (
        lambda: read_genai_config(folder),
        lambda: ChatTemplate.of(folder),
        lambda: summarize(folder),
        lambda: decode_traffic(folder),
    )
    return _refused(*steps) + _source(folder)


def _converted(folder: Path) -> list[str]:
    steps = (
        lambda: summarize(folder),
        lambda: list(damage(folder)),
        lambda: is_made_of(folder, folder.with_name(folder.name + "-source")),
        lambda: read_decoder(folder),
        lambda: read_encoder(folder),
        lambda: decode_traffic(folder),
        lambda: ChatTemplate.of(folder),
        lambda: export_q4nx(folder, folder.with_name("out.q4nx"), force=True),
    )
    return _refused(*steps)


def _with_pictures(folder: Path) -> list[str]:
    return _refused(lambda: image_size(folder), lambda: read_encoder(folder), lambda: summarize(folder))


def _explained(folder: Path) -> list[str]:
    """Makes a session, as `flownpu explain` does."""
    found: list[str] = []
    made = lambda: found.extend(_refused(lambda: explain(folder, {"device": "cpu"}, 1e10)))  # noqa: E731
    return found + _of_session(made, lambda _: None)


def _decode(folder: Path, options: dict[str, str], *lengths: int) -> list[str]:
    """Runs a decoder, with `lengths` tokens in its calls."""

    def run(decoder: DecoderSession) -> None:
        for length in lengths:
            decoder(np.full((1, length), 3))

    return _of_session(lambda: DecoderSession(folder, _devices(), options), run)


def _compiled(folder: Path) -> list[str]:
    from tests.ep.context.test_compiled_models import FEEDS

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_provider_for_devices(_devices(), {})
    return _of_session(
        lambda: onnxruntime.InferenceSession(str(folder / "model.onnx"), options),
        lambda session: session.run(None, FEEDS),
    )


def _q4nx(folder: Path) -> list[str]:
    path = folder / "model.q4nx"

    def read_all() -> None:
        for name, tensor in q4nx_file.read(path).items():
            if tensor.dtype == np.uint8 and name.endswith("o_proj.weight"):
                q4nx_file.blocks(tensor, 32, 32)

    return _refused(read_all, lambda: summarize(path), errors=(ValueError,))


def _images(folder: Path) -> list[str]:
    return [
        text for path in sorted(folder.iterdir()) for text in _refused(lambda p=path: read_image(p, ImageSize(8, 8)))
    ]


def _built(folder: Path) -> list[str]:
    """Runs `flownpu build` again on folders that it has built."""
    found = []
    for kind, name in (("emulate", "emulate"), ("xclbin", "npu2")):
        output = folder / "artifacts" / name
        if output.exists():
            found += _refused(lambda k=kind, o=output: build_artifacts(folder, kind=k, output=o), errors=(ValueError,))
    return found


READERS: dict[str, Callable[[Path], list[str]]] = {
    "source": _source,
    "genai": _genai,
    "converted": _converted,
    "pictures": _with_pictures,
    "explained": _explained,
    "decoder": lambda folder: _decode(folder, {}, 3, 1),
    "emulated": lambda folder: _decode(folder, {"device": "emulate"}, 2, 1),
    "built": _built,
    "compiled": _compiled,
    "q4nx": _q4nx,
    "images": _images,
}

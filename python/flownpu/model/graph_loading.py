# SPDX-License-Identifier: Apache-2.0
"""Loads ONNX models as ONNX Runtime takes them: with external data behind links, and both names of ONNX's domain.

In the cache of Hugging Face every file of a model is a link to a file of another folder, and tools that save space give
one file several names. onnx_ir reads neither.
"""

import os
from functools import cache, partial
from pathlib import Path, PurePosixPath

import onnx_ir as ir

# The domain of ONNX's own operators; onnx_ir shortens it at nodes only.
_LONG_NAME = "ai.onnx"


class LinkedTensor(ir.ExternalTensor):
    """A tensor in a file of the model's folder, wherever this name links to."""

    def __init__(self, tensor: ir.ExternalTensor, folder: Path) -> None:
        """Takes over all properties of a tensor; `folder` is the model's."""
        # Without base_dir, onnx_ir does not check the file's place.
        super().__init__(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name or "",
            doc_string=tensor.doc_string,
            base_dir="",
        )
        self._folder = folder

    @property
    def path(self) -> str:
        """Where the file is."""
        return os.path.join(self._folder, self.location)  # noqa: PTH118 a text, as of all external tensors


def outside(path: Path, location: str) -> str:
    """The reason why a model may not have external data at a location; "" if it may.

    The rule is ONNX Runtime's: the file is in the model's folder, or in that of the file to which the model is a link.

    Args:
        path: the model's file.
        location: the name that the model gives the data's file.
    """
    where = PurePosixPath(location)
    if where.is_absolute() or ".." in where.parts or "\\" in location:
        return f"outside of the folder, in {location!r}"
    file = (path.parent / location).resolve()
    if any(file.is_relative_to(folder) for folder in (path.parent.resolve(), path.resolve().parent)):
        return ""
    return f"in {location!r}, a link to {file}, where neither the model's folder is nor the file that it is a link to"


def load(path: Path) -> ir.Model:
    """Loads a model; its external data is read only when a tensor's values are asked for.

    A tensor that may not be where it is (`outside`) is left to onnx_ir, which refuses to read it.

    Raises:
        Exception: the file is not an ONNX model; protobuf's and onnx_ir's exceptions have no common class.
    """
    model = ir.load(path)
    if _LONG_NAME in model.opset_imports:
        model.opset_imports[""] = model.opset_imports.pop(_LONG_NAME)
    why_not = cache(partial(outside, path))
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and not why_not(str(tensor.location)):
                value.const_value = LinkedTensor(tensor, path.parent)
    return model


def without_links(model: ir.Model, path: Path) -> Path:
    """Lets a model name the files of its external data that links lead to; for models that are given as bytes.

    Of such a model ONNX Runtime is told a folder, and takes no data from outside of it, links or not.

    Args:
        model: what `load` made of the file; changed in place.
        path: the model's file.

    Returns:
        The folder that the names are relative to.
    """
    linked = [
        (value, tensor)
        for graph in model.graphs()
        for value in graph.initializers.values()
        if isinstance(tensor := value.const_value, LinkedTensor)
    ]
    files = {tensor.path: Path(tensor.path).resolve() for _, tensor in linked}
    folder = Path(os.path.commonpath([file.parent for file in files.values()] or [path.parent.resolve()]))
    for value, tensor in linked:
        name = files[tensor.path].relative_to(folder).as_posix()
        value.const_value = ir.ExternalTensor(
            name, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name or "",
            base_dir=folder,
        )  # fmt: skip
    return folder

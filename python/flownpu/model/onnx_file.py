# SPDX-License-Identifier: Apache-2.0
"""Reads ONNX files with onnx_ir; any fault of a file becomes an error that names the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flownpu.errors import FlowNPUError, require

# ONNX Runtime's entry of a session's configuration that names the folder of external data of a model given as bytes.
DATA_FOLDER = "session.model_external_initializers_file_folder_path"

# The exceptions that reading a damaged graph raises: a node lacks an input or an attribute of its operator, or a tensor
# is not in its file, or claims a size that no memory would hold.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RecursionError, TypeError, ValueError)


def load_model(path: Path, *, purpose: str) -> Any:
    """Loads a file as an onnx_ir.Model; external data is read only when a tensor's values are asked for.

    Raises:
        FlowNPUError: the file is not an ONNX model.
        MissingDependencyError: onnx_ir is not installed; the message names `purpose` as what needs it.
    """
    require("onnx_ir", extra="convert", purpose=purpose)
    from flownpu.model.graph_loading import load  # noqa: PLC0415 needs the extra "convert"

    try:
        return load(path)
    except Exception as error:
        # protobuf's parser raises its own errors, and FlowNPU does not depend on that package.
        raise FlowNPUError(f"{path} is not an ONNX model ({error}): export or convert it again") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A context for reading a graph's nodes and tensors: exceptions of a damaged graph become one that names its file.

    Raises:
        FlowNPUError: an input, an attribute or a tensor is missing, or is not what was expected.
    """
    try:
        yield
    except _DAMAGE as error:
        raise FlowNPUError(
            f"{path}: the graph is damaged, or of a form that is not known: {type(error).__name__}: {error}; export "
            "or convert it again"
        ) from error

# SPDX-License-Identifier: Apache-2.0
"""Makes an exported pipeline of diffusers smaller: the weights of all of its graphs in bfloat16 or 8 bits."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx_ir as ir

from flownpu.convert.errors import ConversionError
from flownpu.convert.graph.file import GRAPH_FILE, SMALL_FILES, check_data, check_operators, load_graph, save_graph
from flownpu.convert.manifest import write_manifest
from flownpu.convert.output import output_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flownpu.convert.request import Request

WEIGHTS = ("bf16", "q8")
# The input of each operator that is a weight, and the axis of the weight that counts results.
_OF_OPERATOR = {"Conv": (1, 0), "MatMul": (1, -1), "Gemm": (1, -1), "Gather": (0, 0)}
# Elements: a smaller weight is a latent's or picture's own, and is not worth its error.
_LEAST = 4096


def convert_pipeline_folder(request: Request, weights: str) -> None:
    """Writes the pipeline with narrower weights; graphs stay ONNX's own, for any provider, and compute in float32.

    A weight in bfloat16 is followed by Cast; one in 8 bits, with a scale for each result, by DequantizeLinear, or for a
    convolution by Cast and Mul, which ONNX Runtime computes when a session is made. All other files (schedulers,
    tokenizers, configurations) are copied.

    Args:
        request: source and output.
        weights: "bf16", which "auto" stands for, or "q8".

    Raises:
        ConversionError: a graph cannot be read, or the output cannot be written; nothing is left behind.
    """
    source = request.source
    kind = "bf16" if weights == "auto" else weights
    if kind not in WEIGHTS:
        raise ConversionError(f"{source}: a pipeline's --weights are {' or '.join(WEIGHTS)}, got {kind}")
    graphs = sorted(source.glob(f"*/{GRAPH_FILE}"))
    models = {path: load_graph(path) for path in graphs}
    data = {file for path, model in models.items() for file in check_data(model, path)}
    copied = [
        file for file in sorted(source.rglob("*")) if file.is_file() and file not in data and file not in models
    ]  # fmt: skip
    size = sum(file.stat().st_size for file in [*graphs, *data, *copied]) + SMALL_FILES
    with output_folder(request.output, force=request.force, size=size) as folder:
        for path, model in models.items():
            check_operators(model, path)
            _narrow(model, kind)
            place = folder / path.parent.relative_to(source)
            place.mkdir()
            save_graph(model, place, request.progress, source=path, stage="quantise")
        for file in copied:
            place = folder / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
        write_manifest(
            folder,
            source={"kind": "pipeline of diffusers", "name": request.name},
            read={file.relative_to(source).as_posix(): file for file in [*graphs, *sorted(data), *copied]},
            settings={"weights": kind},
            quantisation={"format": kind},
            packages=("flownpu", "ml_dtypes", "numpy", "onnx", "onnx-ir"),
            progress=request.progress,
        )


def _narrow(model: ir.Model, kind: str) -> None:
    """Replaces the float32 weights of the graph, each once, however many nodes read it."""
    done: dict[str, ir.Value] = {}
    for node in list(model.graph):
        place, axis = _OF_OPERATOR.get(node.op_type, (0, 0))
        value = node.inputs[place] if node.op_type in _OF_OPERATOR else None
        if value is None or value.const_value is None or not value.is_initializer():
            continue
        tensor, name = value.const_value, str(value.name)
        if tensor.dtype != ir.DataType.FLOAT or tensor.size < _LEAST or len(tensor.shape) < 2:
            continue
        transposed = node.attributes.get("transB")
        if transposed is not None and transposed.as_int():
            axis = 0
        key = f"{name} {axis} {node.op_type == 'Conv'}"
        if key not in done:
            made = _narrowed(tensor.numpy(), name, axis, kind, folds=node.op_type == "Conv")
            for one in made:
                for given in one.inputs:
                    if given is not None and given.const_value is not None:
                        model.graph.initializers[str(given.name)] = given
            model.graph.insert_before(node, made)
            done[key] = made[-1].outputs[0]
        node.replace_input_with(place, done[key])
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]


def _narrowed(weight: NDArray[np.float32], name: str, axis: int, kind: str, *, folds: bool) -> list[ir.Node]:
    """The nodes that make the weight in float32 again from initializers; with `folds` before the first run."""

    def given(suffix: str, array: NDArray[np.generic]) -> ir.Value:
        full = f"{name}_{suffix}"
        return ir.Value(
            name=full, const_value=ir.Tensor(array, name=full), type=ir.TensorType(ir.Tensor(array).dtype),
            shape=ir.Shape(array.shape),
        )  # fmt: skip

    attributes = {"to": int(ir.DataType.FLOAT)}
    if kind == "bf16":
        narrow = given("bf16", weight.astype(ml_dtypes.bfloat16))
        return [ir.node("Cast", [narrow], attributes=attributes, name=f"{name}_f32")]
    axis %= weight.ndim
    others = tuple(other for other in range(weight.ndim) if other != axis)
    # Codes from -127 to 127: the largest magnitude of a result's weights is one of them.
    scale = np.maximum(np.abs(weight).max(axis=others, keepdims=True) / 127, np.float32(np.finfo(np.float32).tiny))
    codes = given(f"q8_{axis}", np.rint(weight / scale).astype(np.int8))
    if folds:
        cast = ir.node("Cast", [codes], attributes=attributes, name=f"{name}_cast_{axis}")
        factors = [cast.outputs[0], given(f"scales_{axis}", scale)]
        return [cast, ir.node("Mul", factors, name=f"{name}_f32_{axis}")]
    inputs = [codes, given(f"scale_{axis}", scale.reshape(-1))]
    return [ir.node("DequantizeLinear", inputs, attributes={"axis": axis}, name=f"{name}_rows_{axis}")]

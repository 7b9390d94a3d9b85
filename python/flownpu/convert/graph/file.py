# SPDX-License-Identifier: Apache-2.0
"""Reads the ONNX file of an exported model, and writes that of a model whose graph was rewritten."""

from pathlib import Path

import onnx
import onnx_ir as ir

from flownpu.convert.errors import ConversionError
from flownpu.convert.graph.data_file import DataFile
from flownpu.convert.progress import ProgressCallback, Stage
from flownpu.graph_rewrites.q4nx_tensor import Q4NXTensor
from flownpu.model.graph_loading import load, outside

GRAPH_FILE, DATA_FILE = "model.onnx", "model.onnx.data"
# Bytes to reserve for model.onnx, the configuration and the manifest: the deepest model's take less than half of this.
SMALL_FILES = 4 << 20
# Bytes: larger tensors go into the data file, smaller ones stay in the graph, where ONNX Runtime reads them when it
# loads the model.
_LARGEST_IN_GRAPH = 256


def load_graph(path: Path) -> ir.Model:
    """Loads an ONNX model; its external data is not read.

    Raises:
        ConversionError: the file is not an ONNX model.
    """
    try:
        return load(path)
    except Exception as error:  # any exception of protobuf and the deserialiser for damaged bytes
        raise ConversionError(f"{path}: cannot be read as an ONNX model: {error}") from error


def check_data(model: ir.Model, path: Path) -> list[Path]:
    """The files that hold the model's external data.

    Raises:
        ConversionError: a file is outside the model's folder, missing, or too short for a tensor; or a tensor in it is
            not of numbers.
    """
    files: dict[str, Path] = {}
    for tensor in tensors(model):
        if tensor.dtype in {ir.DataType.UNDEFINED, ir.DataType.STRING}:
            raise ConversionError(f"{path}: expected tensor {tensor.name} to be of numbers, got {tensor.dtype}")
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        location = str(tensor.location)
        if location not in files:
            if reason := outside(path, location):
                raise ConversionError(f"{path}: tensor {tensor.name} is stored {reason}")
            if not (path.parent / location).is_file():
                raise ConversionError(f"{path.parent / location}: the model's weights are in this file; it is missing")
            files[location] = path.parent / location
        size, offset, length = files[location].stat().st_size, tensor.offset or 0, tensor.length or tensor.nbytes
        if length != tensor.nbytes or offset < 0 or offset + length > size:
            raise ConversionError(
                f"{files[location]}: expected {tensor.nbytes} bytes of tensor {tensor.name} at {offset}, and the file "
                f"has {max(0, min(length, size - offset))} there; it is damaged or its copy was cut short"
            )
    return list(files.values())


def check_operators(model: ir.Model, path: Path) -> None:
    """Raises ConversionError if ONNX Runtime lacks an operator, the model's opset does, or the opset is too new.

    Also if a node lacks an input, as in some models of GenAI's builder, or nothing makes one.
    """
    version, newest = model.opset_imports.get("", 0), onnx.defs.onnx_opset_version()
    if version > newest:
        raise ConversionError(f"{path}: ONNX opset {version}, expected {newest} or older; export with an older opset")
    # Imported here, so that other conversions do without ONNX Runtime. None of its public modules lists its operators.
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema  # noqa: PLC0415

    oldest: dict[tuple[str, str], int] = {}
    fewest: dict[tuple[str, str], int] = {}
    for schema in get_all_operator_schema():
        key = schema.domain, schema.name
        oldest[key] = min(schema.since_version, oldest.get(key, schema.since_version))
        fewest[key] = min(schema.min_input, fewest.get(key, schema.min_input))
    unknown, newer = set[str](), set[str]()
    for node in model.graph.all_nodes():
        if node.op_identifier() in model.functions:
            continue
        first = oldest.get((node.domain, node.op_type))
        if first is None:
            unknown.add(f"{node.domain or 'ai.onnx'}.{node.op_type}")
        elif not node.domain and first > version:
            newer.add(f"{node.op_type} (opset {first})")
        lost = _lost_input(node, fewest.get((node.domain, node.op_type), 0))
        if lost:
            raise ConversionError(
                f"{path}: {node.op_type} {node.name}: {lost}; ONNX Runtime does not load the model; if GenAI's "
                "builder made it of one whose embedding is its head, export that with shared_embeddings=false"
            )
    if unknown:
        raise ConversionError(
            f"{path}: {', '.join(sorted(unknown))}: operators that ONNX Runtime does not have; export the model "
            "without them"
        )
    if newer:
        raise ConversionError(
            f"{path}: of ONNX opset {version}, which does not have {', '.join(sorted(newer))}; export the model with a "
            "newer opset"
        )


def _lost_input(node: ir.Node, fewest: int) -> str:
    """The reason if a node has fewer inputs than its operator needs, or reads what nothing makes; else ""."""
    count = max((place for place, value in enumerate(node.inputs, 1) if value is not None), default=0)
    if count < fewest:
        return f"expected {fewest} inputs, got {count}"
    for value in node.inputs:
        if value is not None and not (value.producer() or value.is_graph_input() or value.is_initializer()):
            return f"nothing makes its input {value.name}"
    return ""


def save_graph(
    model: ir.Model, folder: Path, progress: ProgressCallback, *, source: Path, stage: str = "repack"
) -> dict[str, float]:
    """Writes graph and data; returns the relative error of each weight that was repacked or quantised, by name.

    Tensors are written in the order in which the graph uses them, so that a run reads the file from front to end.

    Raises:
        ConversionError: a weight has scales or zero points that are not finite, or the graph cannot be serialised.
    """
    counter = Stage(progress, stage, sum(tensor.nbytes for tensor in tensors(model)), "B")
    errors: dict[str, float] = {}
    with DataFile(folder / DATA_FILE) as data:
        for value in _initializers(model):
            tensor, name = value.const_value, str(value.name)
            if tensor is None:  # an input with a default, which has no bytes
                continue
            try:
                array = tensor.numpy()
            except ValueError as error:
                raise ConversionError(f"{source}: weight {name}: {error}; the source is damaged") from error
            if tensor.nbytes > _LARGEST_IN_GRAPH:
                value.const_value = data.write(name, tensor.dtype, tuple(array.shape), [array])
            else:
                value.const_value = ir.Tensor(array.copy(), name=name)
            if isinstance(tensor, Q4NXTensor):
                errors[name] = round(tensor.relative_error, 6)
            counter.advance(tensor.nbytes)
    try:
        ir.save(model, folder / GRAPH_FILE)
    except ir.serde.SerdeError as error:
        raise ConversionError(f"{source}: the graph is damaged: {error.__cause__ or error}") from error
    return errors


def _initializers(model: ir.Model) -> list[ir.Value]:
    """The graph's initializers in the order of their first use, then those that no node of the main graph uses."""
    used = [value for node in model.graph for value in node.inputs if value is not None and value.is_initializer()]
    return list(dict.fromkeys([*used, *model.graph.initializers.values()]))


def tensors(model: ir.Model) -> list[ir.TensorProtocol]:
    """The values of the model's initializers."""
    return [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]

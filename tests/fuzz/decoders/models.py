# SPDX-License-Identifier: Apache-2.0
"""Small random decoders: like `flownpu convert` writes them, and like ORT GenAI's model builder exports them.

The builder itself takes seconds per model (tests/rewrites/genai_export.py runs it); `_Export` writes the same nodes in
the same order, with random choices where its exports differ.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from flownpu.convert.decoder import Decoder, Layer, Llama3Scaling, Rotary
from flownpu.convert.graph.decoder import build_model, rotary_cache_names
from flownpu.convert.make_model import RandomWeights
from flownpu.convert.weights import ProjectionWeight, weight_plan
from tests.fuzz.choices import Choices

VOCABULARY = 128
# Positions that the rotary tables hold: more than any script takes.
CONTEXT = 128
FLOAT, INT64, INT32, UINT8 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.UINT8
MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class DecoderModel:
    """A decoder's ONNX model.

    `layers`, `kv_heads`, `head_size`, `cache` (ONNX's element type): of its KV cache. `all_logits`: whether it has the
    logits of all tokens, not of the last only. `description`: its configuration as text.
    """

    model: bytes
    layers: int
    kv_heads: int
    head_size: int
    cache: int
    all_logits: bool
    description: str = ""


def random_decoder(choices: Choices) -> Decoder:
    """A random configuration of a decoder."""
    kv_heads = choices.pick((1, 2, 3))
    head_size = choices.pick((16, 32, 64, 48, 80))
    window = choices.pick((None, None, 5, 8, 16))
    scaling = choices.pick((None, None, Llama3Scaling(8.0, 1.0, 4.0, 64)))
    full = Layer(Rotary(10000.0, scaling))
    layers = tuple(
        full if window is None or choices.chance(40) else Layer(choices.pick((full.rotary, Rotary(100.0))), window)
        for _ in range(choices.pick((2, 1, 3)))
    )
    return Decoder(
        family="llama",
        hidden_size=choices.pick((32, 64, 96, 128, 48, 100)),
        feed_forward_size=choices.pick((64, 48, 176, 100)),
        heads=kv_heads * choices.pick((1, 2, 3)),
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary_size=VOCABULARY,
        context_length=CONTEXT,
        layers=layers,
        gating=choices.pick(("swiglu", "geglu")),
        norm_epsilon=choices.pick((1e-6, 1e-5)),
        attention_scale=head_size**-0.5 * choices.pick((1.0, 1.5)),
        qk_norm=choices.chance(35),
        sandwich_norms=choices.chance(30),
        embedding_scale=choices.pick((1.0, 4.0)),
        attention_softcap=choices.pick((0.0, 0.0, 3.0)),
        logit_softcap=choices.pick((0.0, 0.0, 5.0)),
        tied_embeddings=choices.chance(50),
    )


def converted(choices: Choices) -> DecoderModel:
    """A random decoder like `flownpu convert` writes it."""
    decoder = random_decoder(choices)
    rng = np.random.default_rng(choices.seed())
    weights = RandomWeights(choices.seed(), symmetric=choices.chance(50))
    tensors: dict[str, ir.TensorProtocol] = {}
    for weight in weight_plan(decoder):
        if isinstance(weight, ProjectionWeight):
            tensors[weight.name] = ir.tensor(np.concatenate([part.blocks for part in weights.blocks(weight)]))
        else:
            # Not all ones, so that a lost or swapped weight shows.
            tensors[weight.name] = ir.tensor((1 + 0.2 * rng.standard_normal(weight.size)).astype(np.float32))
    for i, rotary in enumerate(decoder.rotaries):
        for name, table in zip(rotary_cache_names(i), rotary.caches(CONTEXT, decoder.head_size), strict=True):
            tensors[name] = ir.tensor(table)
    kv_dtype = choices.pick(("fp32", "bf16", "fp16"))
    all_logits = choices.chance(50)
    model = build_model(decoder, tensors, kv_dtype=kv_dtype, logits="all" if all_logits else "last")
    cache = {"fp32": FLOAT, "bf16": TensorProto.BFLOAT16, "fp16": TensorProto.FLOAT16}[kv_dtype]
    serialised = ir.to_proto(model).SerializeToString()
    sizes = len(decoder.layers), decoder.kv_heads, decoder.head_size
    return DecoderModel(serialised, *sizes, cache, all_logits, f"converted {decoder}")


def exported(choices: Choices) -> DecoderModel:
    """A random decoder like ORT GenAI's model builder exports it."""
    return _Export(random_decoder(choices), choices).write()


class _Export:
    """Writes GatherBlockQuantized, MatMulNBits, GroupQueryAttention and what is between them."""

    def __init__(self, decoder: Decoder, choices: Choices) -> None:
        self.decoder, self.choices = decoder, choices
        self.rng = np.random.default_rng(choices.seed())
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.zero_points = choices.chance(40)
        self.block = choices.pick((32, 32, 32, 64, 128))
        self.packed = choices.chance(40) and not decoder.qk_norm
        self.bias = choices.chance(25)
        self.all_logits = choices.chance(50)

    def write(self) -> DecoderModel:
        decoder = self.decoder
        self._input("input_ids", INT64, ["batch_size", "sequence_length"])
        self._input("attention_mask", INT64, ["batch_size", "total_sequence_length"])
        lengths, total = self._lengths()
        hidden = self._embedding()
        # The next norm adds the residual, so the first norm has nothing to add.
        normed, residual = self._norm(hidden), hidden
        for i in range(len(decoder.layers)):
            x = self._attention(i, normed, lengths, total)
            normed, residual = self._skip_norm(residual, self._norm(x) if decoder.sandwich_norms else x)
            x = self._feed_forward(normed)
            normed, residual = self._skip_norm(residual, self._norm(x) if decoder.sandwich_norms else x)
        if not self.all_logits:
            normed = self._last(normed, lengths)
        logits = self._project(normed, decoder.hidden_size, VOCABULARY)
        if cap := decoder.logit_softcap:
            scaled = self._op("Div", [logits, self._constant(np.float32(cap))])
            logits = self._op("Mul", [self._op("Tanh", [scaled]), self._constant(np.float32(cap))])
        self._op("Identity", [logits], ["logits"])
        self.outputs.insert(0, helper.make_tensor_value_info("logits", FLOAT, None))
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, self.constants)
        imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()
        sizes = len(decoder.layers), decoder.kv_heads, decoder.head_size
        return DecoderModel(model, *sizes, FLOAT, self.all_logits, f"exported {decoder}")

    # --- Parts -------------------------------------------------------------------------------------------------------

    def _lengths(self) -> tuple[str, str]:
        axis = self._constant(np.array([1], np.int64))
        count = self._op("ReduceSum", ["attention_mask", axis], keepdims=0)
        lengths = self._op("Cast", [self._op("Sub", [count, axis])], to=INT32)
        size = self._op("Gather", [self._op("Shape", ["attention_mask"]), self._constant(np.int64(1))])
        return lengths, self._op("Cast", [size], to=INT32)

    def _embedding(self) -> str:
        size = self.decoder.hidden_size
        if size % 32 == 0 and self.choices.chance(60):
            codes, scales, zeros = self._blocks(VOCABULARY, size, 32, spread=1.0)
            shape = self._constant(np.array([VOCABULARY, size // 2], np.int64))
            flat = self._op("Reshape", [codes, shape])
            attributes: dict[str, Any] = {"bits": 4, "block_size": 32, "gather_axis": 0, "quantize_axis": 1}
            hidden = self._op(
                "GatherBlockQuantized", [flat, "input_ids", scales, zeros], domain=MICROSOFT, **attributes
            )
        else:
            table = self._constant(self.rng.standard_normal((VOCABULARY, size)).astype(np.float32))
            hidden = self._op("Gather", [table, "input_ids"])
        if self.decoder.embedding_scale != 1:
            hidden = self._op("Mul", [hidden, self._constant(np.float32(self.decoder.embedding_scale))])
        return hidden

    def _attention(self, index: int, x: str, lengths: str, total: str) -> str:
        decoder = self.decoder
        layer, d = decoder.layers[index], decoder.head_size
        widths = [decoder.heads * d, decoder.kv_heads * d, decoder.kv_heads * d]
        if self.packed:
            vectors = [self._project(x, decoder.hidden_size, sum(widths)), "", ""]
        else:
            vectors = [self._project(x, decoder.hidden_size, width) for width in widths]
        if decoder.qk_norm:
            vectors[:2] = [self._head_norm(v, w) for v, w in zip(vectors[:2], widths[:2], strict=True)]
        caches = []
        for part in ("key", "value"):
            shape = ["batch_size", decoder.kv_heads, f"past_{index}", d]
            caches.append(self._input(f"past_key_values.{index}.{part}", FLOAT, shape))
            self.outputs.append(helper.make_tensor_value_info(f"present.{index}.{part}", FLOAT, None))
        tables = [self._constant(table) for table in layer.rotary.caches(CONTEXT, d)]
        attributes: dict[str, Any] = {
            "num_heads": decoder.heads,
            "kv_num_heads": decoder.kv_heads,
            "scale": decoder.attention_scale,
            "softcap": decoder.attention_softcap,
            "local_window_size": layer.window or -1,
            "do_rotary": 1,
        }
        inputs = [*vectors, *caches, lengths, total, *tables]
        if self.choices.chance(10):
            sink = self.rng.standard_normal(decoder.heads).astype(np.float32)
            inputs += ["", "", self._constant(sink)]
        outputs = [f"attention_{index}", f"present.{index}.key", f"present.{index}.value"]
        output = self._op("GroupQueryAttention", inputs, outputs, domain=MICROSOFT, **attributes)
        return self._project(output, widths[0], decoder.hidden_size)

    def _head_norm(self, x: str, width: int) -> str:
        d = self.decoder.head_size
        cut = self._op("Reshape", [x, self._constant(np.array([0, -1, d], np.int64))])
        return self._op("Reshape", [self._norm(cut, d), self._constant(np.array([0, -1, width], np.int64))])

    def _feed_forward(self, x: str) -> str:
        size, inner = self.decoder.hidden_size, self.decoder.feed_forward_size
        gate, up = self._project(x, size, inner), self._project(x, size, inner)
        if self.decoder.gating == "swiglu":
            activated = self._op("Mul", [gate, self._op("Sigmoid", [gate])])
        elif self.choices.chance(50):
            activated = self._op("Gelu", [gate], approximate="tanh")
        else:
            activated = self._op("FastGelu", [gate], domain=MICROSOFT)
        return self._project(self._op("Mul", [activated, up]), inner, size)

    def _last(self, x: str, lengths: str) -> str:
        """The hidden state at index min(length, new tokens) - 1 of each row."""
        new = self._op("Shape", ["input_ids"], start=1, end=2)
        newest = self._op("Sub", [new, self._constant(np.array([1], np.int64))])
        place = self._op("Min", [self._op("Cast", [lengths], to=INT64), newest])
        index = self._op("Unsqueeze", [place, self._constant(np.array([1, 2], np.int64))])
        return self._op("GatherND", [x, index], batch_dims=1)

    def _norm(self, x: str, size: int | None = None) -> str:
        weight = self._norm_weight(size or self.decoder.hidden_size)
        epsilon = self.decoder.norm_epsilon
        return self._op("SimplifiedLayerNormalization", [x, weight], axis=-1, epsilon=epsilon, stash_type=1)

    def _skip_norm(self, residual: str, x: str) -> tuple[str, str]:
        names = [f"skip_{len(self.nodes)}", "", "", f"sum_{len(self.nodes)}"]
        inputs = [residual, x, self._norm_weight(self.decoder.hidden_size)]
        epsilon = self.decoder.norm_epsilon
        self._op("SkipSimplifiedLayerNormalization", inputs, names, domain=MICROSOFT, epsilon=epsilon)
        return names[0], names[3]

    def _norm_weight(self, size: int) -> str:
        return self._constant((1 + 0.2 * self.rng.standard_normal(size)).astype(np.float32))

    def _project(self, x: str, columns: int, rows: int) -> str:
        given = self._blocks(rows, columns, self.block, spread=columns**-0.5)
        y = self._op("MatMulNBits", [x, *given], domain=MICROSOFT, K=columns, N=rows, bits=4, block_size=self.block)
        if self.bias and self.choices.chance(30):
            y = self._op("Add", [y, self._constant(self.rng.standard_normal(rows).astype(np.float32))])
        return y

    def _blocks(self, rows: int, columns: int, block: int, *, spread: float) -> list[str]:
        """Codes, scales and zero points; scales have 4 bits, so that bfloat16 holds their products with zero points."""
        blocks = -(-columns // block)
        codes = self._constant(self.rng.integers(0, 256, (rows, blocks, block // 2)).astype(np.uint8))
        exponent = np.round(np.log2(spread / 4.6 / 12))  # 4.6: standard deviation of codes
        scales = self._constant((self.rng.integers(8, 16, (rows, blocks)) * 2.0**exponent).astype(np.float32))
        if not self.zero_points:
            return [codes, scales, ""]
        # Near the middle, so that weights have a mean near 0.
        points = self.rng.integers(7, 10, (rows, blocks + blocks % 2))
        return [codes, scales, self._constant((points[:, ::2] | points[:, 1::2] << 4).astype(np.uint8))]

    # --- Nodes -------------------------------------------------------------------------------------------------------

    def _input(self, name: str, kind: int, shape: list[Any]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def _constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(np.asarray(array), name))
        return name

    def _op(
        self, op_type: str, inputs: list[str], outputs: list[str] | None = None, domain: str = "", **attributes: Any
    ) -> str:
        names = outputs or [f"v{len(self.nodes)}"]
        inputs = list(inputs)
        while inputs and not inputs[-1]:
            inputs.pop()
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, names, name, domain=domain, **attributes))
        return names[0]


def with_rounded_activations(model: bytes, activations: str) -> bytes:
    """The model with nodes that round the activations of products with 4-bit weights, like the provider's option says.

    int8 has one scale per row here, where FlowNPU has one per 32 or 256 columns: this rounds at least as much.
    """
    proto = onnx.load_from_string(model)
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        if node.op_type in ("MatMulNBits", "Q4NXMatMul"):
            nodes += _rounding(node, activations)
        nodes.append(node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(127, np.float32), "one_twenty_seven"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1], np.int64), "last_axis"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1e-30, np.float32), "least_scale"))
    return bytes(proto.SerializeToString())


def _rounding(node: onnx.NodeProto, activations: str) -> list[onnx.NodeProto]:
    x, stem = node.input[0], f"{node.output[0]}.rounded"

    def made(op_type: str, inputs: list[str], suffix: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op_type, inputs, [stem + suffix], **attributes)

    node.input[0] = stem
    if activations == "bf16":
        return [made("Cast", [x], ".half", to=TensorProto.BFLOAT16), made("Cast", [stem + ".half"], "", to=FLOAT)]
    return [
        made("Abs", [x], ".magnitude"),
        made("ReduceMax", [stem + ".magnitude", "last_axis"], ".largest"),
        made("Max", [stem + ".largest", "least_scale"], ".present"),
        made("Div", [stem + ".present", "one_twenty_seven"], ".scale"),
        made("Div", [x, stem + ".scale"], ".scaled"),
        made("Round", [stem + ".scaled"], ".integers"),
        made("Mul", [stem + ".integers", stem + ".scale"], ""),
    ]

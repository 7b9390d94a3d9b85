# SPDX-License-Identifier: Apache-2.0
"""ORT GenAI on ONNX Runtime's own CPU provider: int4 weights (MatMulNBits) with int8 activations (accuracy level 4).

The graph is like one that GenAI's model builder writes for the CPU with its fastest options: MatMulNBits with blocks of
32 and accuracy_level 4, GroupQueryAttention with RoPE inside, float32 activations and KV cache, the LM head shared with
the embedding where it is tied, logits of the last token only.

`convert` and `Engine` run in this peer's own environment.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from flownpu.peers.exported import ExportedModel

REQUIREMENTS = ("numpy", "onnx-ir==1.1.0", "onnxruntime==1.31.1", "onnxruntime-genai==0.18.0")

_OPSET = 21
_BLOCK = 32


def convert(model: "ExportedModel", output: Path) -> None:
    """Writes model.onnx and genai_config.json."""
    import onnx_ir as ir  # noqa: PLC0415 only this peer's environment has it

    model.check_dense()
    ir.save(_Builder(model).model(), output / "model.onnx", external_data="model.onnx.data")
    settings = {
        "model": {
            "type": model.family,
            "context_length": model.context_length,
            "vocab_size": model.vocabulary_size,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "decoder": {
                "filename": "model.onnx",
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "hidden_size": model.hidden_size,
                "head_size": model.head_size,
                "num_attention_heads": model.heads,
                "num_key_value_heads": model.kv_heads,
                "num_hidden_layers": len(model.windows),
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"do_sample": False, "past_present_share_buffer": True, "max_length": model.context_length},
    }
    (output / "genai_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


class Engine:
    """A model opened in ORT GenAI."""

    def __init__(self, folder: Path, *, threads: int, context: int, options: dict[str, str]) -> None:
        del context, options  # each generator has its own length; there are no options
        import onnxruntime_genai  # noqa: PLC0415 only this peer's environment has it

        self.version = f"onnxruntime-genai {onnxruntime_genai.__version__}"
        self._genai = onnxruntime_genai
        config = onnxruntime_genai.Config(str(folder))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = onnxruntime_genai.Model(config)
        self._generator: Any = None

    def start(self, length: int) -> None:
        """Begins a sequence of up to `length` tokens."""
        parameters = self._genai.GeneratorParams(self._model)
        # min_length: a token that ends the text must not end a measurement.
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
        self._generator = None  # frees its KV cache before the next one is allocated
        self._generator = self._genai.Generator(self._model, parameters)

    def read(self, tokens: Any) -> None:
        """Computes tokens, up to the logits of the last."""
        self._generator.append_tokens(tokens)

    def generate_next(self) -> int:
        """Generates a token."""
        self._generator.generate_next_token()
        return int(self._generator.get_next_tokens()[0])

    def logits(self) -> Any:
        """The last token's logits, float32 [V]."""
        return np.asarray(self._generator.get_logits()).reshape(-1)


class _Builder:
    """Writes the graph; shapes as in `flownpu.convert.graph.decoder`."""

    def __init__(self, model: "ExportedModel") -> None:
        import onnx_ir  # noqa: PLC0415 only this peer's environment has it
        from onnx_ir.tape import Tape  # noqa: PLC0415

        self.ir: Any = onnx_ir
        self.decoder = model
        self.tape: Any = Tape()
        self.initializers: dict[str, Any] = {}
        self.inputs: list[Any] = []
        self.present: list[Any] = []

    def model(self) -> Any:
        ir, decoder = self.ir, self.decoder
        input_ids = self._input("input_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
        mask = self._input("attention_mask", ir.DataType.INT64, ["batch_size", "total_sequence_length"])
        counts = self._op("ReduceSum", [mask, self._constant("axis_1", np.array([1]))], keepdims=0)
        lasts = self._op("Sub", [counts, self._constant("one", np.array([1]))])
        lengths = self._op("Cast", [lasts], to=ir.DataType.INT32.value)
        shape = self._op("Shape", [mask])
        total = self._op("Gather", [shape, self._constant("index_1", np.array(1))], axis=0)
        total = self._op("Cast", [total], to=ir.DataType.INT32.value)
        residual = self._embed(input_ids)
        hidden = self._norm(residual, "layers.0.input_layernorm")
        for i in range(len(decoder.windows)):
            hidden, residual = self._layer(i, hidden, residual, lengths, total)
        logits = self._logits(self._last_token(hidden))
        logits.name, logits.dtype = "logits", ir.DataType.FLOAT
        logits.shape = ir.Shape(["batch_size", 1, decoder.vocabulary_size])
        graph = ir.Graph(
            self.inputs,
            [logits, *self.present],
            nodes=self.tape.nodes,
            initializers=list(self.initializers.values()),
            opset_imports={"": _OPSET, "com.microsoft": 1},
            name="decoder",
        )
        return ir.Model(graph, ir_version=10)

    def _layer(self, i: int, hidden: Any, residual: Any, lengths: Any, total: Any) -> tuple[Any, Any]:
        decoder, mlp, count = self.decoder, f"layers.{i}.mlp", len(self.decoder.windows)
        hidden = self._attention(i, hidden, lengths, total)
        before_mlp = "post_attention_layernorm"
        if decoder.sandwich_norms:
            hidden, before_mlp = self._norm(hidden, f"layers.{i}.{before_mlp}"), "pre_feedforward_layernorm"
        hidden, residual = self._residual_norm(hidden, residual, f"layers.{i}.{before_mlp}")
        gate, up = (self._project(hidden, f"{mlp}.{part}_proj", [f"{mlp}.{part}_proj"]) for part in ("gate", "up"))
        if decoder.gating == "geglu":
            gate = self._op("FastGelu", [gate], domain="com.microsoft")
        else:
            gate = self._op("QuickGelu", [gate], domain="com.microsoft", alpha=1.0)  # x * sigmoid(x)
        hidden = self._project(self._op("Mul", [gate, up]), f"{mlp}.down_proj", [f"{mlp}.down_proj"])
        if decoder.sandwich_norms:
            hidden = self._norm(hidden, f"layers.{i}.post_feedforward_layernorm")
        return self._residual_norm(hidden, residual, "norm" if i + 1 == count else f"layers.{i + 1}.input_layernorm")

    def _embed(self, input_ids: Any) -> Any:
        # Shares its bytes with the LM head, if they are tied.
        codes, scales = self._weight("embed_tokens", ["embed_tokens"])
        rows = self._op(
            "GatherBlockQuantized",
            [
                self._op("Reshape", [codes, self._constant("rows", np.array([self.decoder.vocabulary_size, -1]))]),
                input_ids,
                self._op("Reshape", [scales, self._constant("rows", np.array([self.decoder.vocabulary_size, -1]))]),
            ],
            domain="com.microsoft",
            bits=4,
            block_size=_BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )
        if self.decoder.embedding_scale == 1.0:
            return rows
        return self._op("Mul", [rows, self._constant("scale", np.array(self.decoder.embedding_scale, np.float32))])

    def _attention(self, index: int, hidden: Any, lengths: Any, total: Any) -> Any:
        ir, decoder, name = self.ir, self.decoder, f"layers.{index}.self_attn"
        cache_shape = ["batch_size", decoder.kv_heads, None, decoder.head_size]
        past = [
            self._input(f"past_key_values.{index}.{part}", ir.DataType.FLOAT, cache_shape) for part in ("key", "value")
        ]
        if decoder.qk_norm:
            # ONNX Runtime's attention computes norms of heads itself on GPUs only.
            parts = [self._project(hidden, f"{name}.{part}_proj", [f"{name}.{part}_proj"]) for part in "qkv"]
            parts[:2] = [self._head_norm(x, f"{name}.{part}_norm") for x, part in zip(parts[:2], "qk", strict=True)]
        else:
            packed = self._project(hidden, f"{name}.qkv_proj", [f"{name}.{part}_proj" for part in "qkv"])
            parts = [packed, None, None]
        caches = decoder.rotary_caches(decoder.rotaries[index], decoder.context_length)
        cos, sin = (
            self._constant(f"rotary.{decoder.rotaries[index]}.{part}", cache)
            for part, cache in zip(("cos", "sin"), caches, strict=True)
        )
        output, *present = self.tape.op_multi_out(
            "GroupQueryAttention",
            [*parts, *past, lengths, total, cos, sin],
            attributes={
                "num_heads": decoder.heads,
                "kv_num_heads": decoder.kv_heads,
                "scale": decoder.attention_scale,
                "softcap": decoder.attention_softcap,
                "local_window_size": decoder.windows[index],
                "do_rotary": 1,
            },
            num_outputs=3,
            domain="com.microsoft",
            version=1,
        )
        for value, part in zip(present, ("key", "value"), strict=True):
            value.name, value.dtype = f"present.{index}.{part}", ir.DataType.FLOAT
            value.shape = ir.Shape(cache_shape)
            self.present.append(value)
        return self._project(output, f"{name}.o_proj", [f"{name}.o_proj"])

    def _last_token(self, hidden: Any) -> Any:
        last = [self._constant(name, np.array([value])) for name, value in (("minus_one", -1), ("end", 2**62))]
        return self._op("Slice", [hidden, *last, self._constant("one", np.array([1]))])

    def _logits(self, hidden: Any) -> Any:
        head = "embed_tokens" if self.decoder.tied_embeddings else "lm_head"
        logits = self._project(hidden, head, [head])
        if cap := self.decoder.logit_softcap:
            softcap = self._constant("softcap", np.array(cap, np.float32))
            logits = self._op("Mul", [self._op("Tanh", [self._op("Div", [logits, softcap])]), softcap])
        return logits

    def _project(self, x: Any, name: str, parts: list[str]) -> Any:
        codes, scales = self._weight(name, parts)
        rows, groups = codes.const_value.shape.numpy()[:2]
        return self._op(
            "MatMulNBits",
            [x, codes, scales],
            domain="com.microsoft",
            N=rows,
            K=groups * _BLOCK,
            bits=4,
            block_size=_BLOCK,
            accuracy_level=4,
        )

    def _weight(self, name: str, parts: list[str]) -> tuple[Any, Any]:
        if f"{name}.codes" not in self.initializers:
            codes, scales = self.decoder.stacked(parts)
            codes = codes.reshape(len(codes), -1, _BLOCK // 2)
            self._constant(f"{name}.codes", codes)
            self._constant(f"{name}.scales", scales.astype(np.float32))
        return self.initializers[f"{name}.codes"], self.initializers[f"{name}.scales"]

    def _norm(self, x: Any, weight: str) -> Any:
        inputs = [x, self._vector(weight)]
        return self._op(
            "SimplifiedLayerNormalization", inputs, axis=-1, epsilon=self.decoder.norm_epsilon, stash_type=1
        )

    def _head_norm(self, x: Any, weight: str) -> Any:
        by_head = self._op("Reshape", [x, self._constant("by_head", np.array([0, 0, -1, self.decoder.head_size]))])
        return self._op("Reshape", [self._norm(by_head, weight), self._constant("by_token", np.array([0, 0, -1]))])

    def _residual_norm(self, x: Any, residual: Any, weight: str) -> tuple[Any, Any]:
        normalised, mean, deviation, total = self.tape.op_multi_out(
            "SkipSimplifiedLayerNormalization",
            [residual, x, self._vector(weight)],
            attributes={"epsilon": self.decoder.norm_epsilon},
            num_outputs=4,
            domain="com.microsoft",
            version=1,
        )
        mean.name = deviation.name = ""
        return normalised, total

    def _op(self, op_type: str, inputs: list[Any], *, domain: str = "", **attributes: Any) -> Any:
        return self.tape.op(op_type, inputs, attributes, domain=domain, version=1 if domain else _OPSET)

    def _input(self, name: str, dtype: Any, shape: list[Any]) -> Any:
        value = self.ir.Value(name=name, type=self.ir.TensorType(dtype), shape=self.ir.Shape(shape))
        self.inputs.append(value)
        return value

    def _vector(self, name: str) -> Any:
        return self.initializers.get(name) or self._constant(name, self.decoder.vector(name))

    def _constant(self, name: str, array: Any) -> Any:
        if name not in self.initializers:
            tensor = self.ir.Tensor(np.ascontiguousarray(array), name=name)
            self.initializers[name] = self.ir.Value(
                name=name, type=self.ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
            )
        return self.initializers[name]

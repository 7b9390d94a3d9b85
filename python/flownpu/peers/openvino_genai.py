# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI on the CPU: int4 weights with groups of 32, as NNCF's INT4_SYM compresses them.

The graph is a stateful decoder in the form that optimum-intel exports, in which OpenVINO's patterns find what it fuses:
compressed weights, RMS norms, rotary embeddings, attention with its cache. It runs in GenAI's continuous batching
pipeline, which turns the attention into PagedAttention, with default precisions: int8 activations in groups, bf16
where the processor has it, an int8 KV cache.

`convert` and `Engine` run in this peer's own environment.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from flownpu.peers.exported import ExportedModel

REQUIREMENTS = (
    "numpy",
    "openvino==2026.4.1",
    "openvino-genai==2026.4.1.0",
    "openvino-tokenizers==2026.4.1.0",
)

_GROUP = 32
# Tokens in a block of the paged KV cache on the CPU.
_KV_BLOCK = 32


def convert(model: "ExportedModel", output: Path) -> None:
    """Writes openvino_model.xml and .bin.

    Raises:
        ValueError: the model has experts, norms of all heads together, or soft caps.
    """
    import openvino  # noqa: PLC0415 only this peer's environment has it

    model.check_dense()
    if model.attention_softcap or model.logit_softcap:
        raise ValueError("this converter writes no soft caps")
    openvino.save_model(_Builder(model).model(), output / "openvino_model.xml", compress_to_fp16=False)


class Engine:
    """A model opened in GenAI's continuous batching pipeline; each step of the pipeline is one pass of the model."""

    def __init__(self, folder: Path, *, threads: int, context: int, options: dict[str, str]) -> None:
        del options  # there are none
        import openvino  # noqa: PLC0415 only this peer's environment has it
        import openvino_genai  # noqa: PLC0415

        self.version = f"openvino-genai {openvino_genai.__version__}"
        self._tensor: Any = openvino.Tensor
        self._settings: Any = openvino_genai.GenerationConfig
        scheduler = openvino_genai.SchedulerConfig()
        # A prompt is one pass. The cache has room for a request and for the prefix of an earlier one, which `read`
        # continues.
        scheduler.max_num_batched_tokens = context
        scheduler.enable_prefix_caching = True
        scheduler.num_kv_blocks = 2 * -(-context // _KV_BLOCK) + 1
        self._pending: int | None = None
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder, openvino_genai.Tokenizer(folder), scheduler, "CPU", INFERENCE_NUM_THREADS=threads
        )
        self._requests = 0
        self._handle: Any = None

    def start(self, length: int) -> None:
        """Begins a sequence of up to `length` tokens."""
        if self._handle is not None:
            self._handle.cancel()
            self._pipeline.step()
        self._length = length
        self._read = np.empty(0, np.int64)
        self._handle = None

    def read(self, tokens: Any) -> None:
        """Computes tokens, and generates one; tokens that were read before come from the prefix cache."""
        if self._handle is not None:
            self._handle.cancel()
            self._pipeline.step()
        self._read = np.concatenate([self._read, tokens.astype(np.int64)])
        count = self._length - len(self._read)
        # GenAI demands a token that ends the text, though it is ignored.
        settings = self._settings(max_new_tokens=count, ignore_eos=True, eos_token_id=0, do_sample=False)
        self._requests += 1
        self._handle = self._pipeline.add_request(self._requests, self._tensor(self._read[None]), settings)
        self._pipeline.step()
        self._pending = self._token()

    def generate_next(self) -> int:
        """Generates a token; the first one came with the prompt."""
        if self._pending is None:
            self._pipeline.step()
            self._pending = self._token()
        token, self._pending = self._pending, None
        return token

    def _token(self) -> int:
        (output,) = self._handle.read().values()
        return int(output.generated_ids[-1])


class _Builder:
    """Writes the graph; shapes as in `flownpu.convert.graph.decoder`."""

    def __init__(self, model: "ExportedModel") -> None:
        import openvino  # noqa: PLC0415 only this peer's environment has it
        from openvino import opset13  # noqa: PLC0415

        self.openvino: Any = openvino
        self.ops: Any = opset13
        self.decoder = model
        self.assigns: list[Any] = []
        self.tables: dict[str, Any] = {}
        self.rotations: dict[int, tuple[Any, Any]] = {}
        self.masks: dict[int, Any] = {}

    def model(self) -> Any:
        ops, decoder = self.ops, self.decoder
        self.input_ids = self._parameter("input_ids", [-1, -1], np.int64)
        self.attention_mask = self._parameter("attention_mask", [-1, -1], np.int64)
        self.position_ids = self._parameter("position_ids", [-1, -1], np.int64)
        self.beam_idx = self._parameter("beam_idx", [-1], np.int32)
        rows = ops.convert(self.input_ids, np.int32)
        hidden = ops.gather(self._weight("embed_tokens"), rows, ops.constant(0))
        if decoder.embedding_scale != 1.0:
            hidden = ops.multiply(hidden, ops.constant(np.float32(decoder.embedding_scale)))
        for i in range(len(decoder.windows)):
            hidden = self._layer(i, hidden)
        head = "embed_tokens" if decoder.tied_embeddings else "lm_head"
        logits = self._project(self._norm(hidden, "norm"), head)
        logits.output(0).set_names({"logits"})
        parameters = [self.input_ids, self.attention_mask, self.position_ids, self.beam_idx]
        return self.openvino.Model([ops.result(logits)], self.assigns, parameters, "decoder")

    def _layer(self, i: int, hidden: Any) -> Any:
        ops, decoder, layer = self.ops, self.decoder, f"layers.{i}"
        before_mlp = "pre_feedforward_layernorm" if decoder.sandwich_norms else "post_attention_layernorm"
        output = self._attention(i, self._norm(hidden, f"{layer}.input_layernorm"))
        if decoder.sandwich_norms:
            output = self._norm(output, f"{layer}.post_attention_layernorm")
        hidden = ops.add(hidden, output)
        output = self._norm(hidden, f"{layer}.{before_mlp}")
        gate, up = (self._project(output, f"{layer}.mlp.{part}_proj") for part in ("gate", "up"))
        gate = ops.gelu(gate, "tanh") if decoder.gating == "geglu" else ops.swish(gate)
        output = self._project(ops.multiply(gate, up), f"{layer}.mlp.down_proj")
        if decoder.sandwich_norms:
            output = self._norm(output, f"{layer}.post_feedforward_layernorm")
        return ops.add(hidden, output)

    def _attention(self, i: int, hidden: Any) -> Any:
        ops, decoder, name = self.ops, self.decoder, f"layers.{i}.self_attn"
        query = self._heads(hidden, f"{name}.q", decoder.heads, norm=decoder.qk_norm)
        key = self._heads(hidden, f"{name}.k", decoder.kv_heads, norm=decoder.qk_norm)
        value = self._heads(hidden, f"{name}.v", decoder.kv_heads, norm=False)
        cos, sin = self._rotation(decoder.rotaries[i])
        query, key = self._rotate(query, cos, sin), self._rotate(key, cos, sin)
        key = self._repeat(self._cache(key, f"past_key_values.{i}.key"))
        value = self._repeat(self._cache(value, f"past_key_values.{i}.value"))
        scale = ops.constant(np.float32(decoder.attention_scale))
        output = ops.scaled_dot_product_attention(query, key, value, self._mask(decoder.windows[i]), scale)
        output = ops.transpose(output, self._integers(0, 2, 1, 3))
        output = ops.reshape(output, self._integers(0, 0, decoder.heads * decoder.head_size), special_zero=True)
        return self._project(output, f"{name}.o_proj")

    def _heads(self, hidden: Any, name: str, heads: int, *, norm: bool) -> Any:
        ops = self.ops
        shape = self._integers(0, 0, heads, self.decoder.head_size)
        x = ops.reshape(self._project(hidden, f"{name}_proj"), shape, special_zero=True)
        if norm:
            x = self._norm(x, f"{name}_norm")
        return ops.transpose(x, self._integers(0, 2, 1, 3))

    def _cache(self, new: Any, name: str) -> Any:
        """The cache with the new tokens appended: [B, G, T, d]."""
        ops, decoder = self.ops, self.decoder
        batch = ops.gather(ops.shape_of(self.input_ids), self._integers(0), ops.constant(0))
        shape = ops.concat([batch, self._integers(decoder.kv_heads), self._integers(0, decoder.head_size)], 0)
        empty = ops.broadcast(ops.constant(np.float32(0)), shape)
        variable = f"{name}present.{name}"
        extent = [-1, decoder.kv_heads, -1, decoder.head_size]
        past = ops.read_value(empty, variable, np.float32, extent)
        past = ops.gather(past, self.beam_idx, ops.constant(0))
        present = ops.concat([past, new], 2)
        self.assigns.append(ops.assign(present, variable))
        return present

    def _repeat(self, cache: Any) -> Any:
        """The cache with each head repeated for the query heads of its group: [B, H, T, d]."""
        ops, decoder = self.ops, self.decoder
        group = decoder.heads // decoder.kv_heads
        if group == 1:
            return cache
        cache = ops.unsqueeze(cache, ops.constant(2))
        cache = ops.broadcast(cache, self._integers(1, 1, group, 1, 1), broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(cache, self._integers(0, decoder.heads, -1, decoder.head_size), special_zero=True)

    def _rotation(self, index: int) -> tuple[Any, Any]:
        """Cos and sin of the new tokens' angles: [B, 1, S, d]."""
        if index not in self.rotations:
            ops = self.ops
            frequencies = ops.constant(self.decoder.vector(f"rotary.{index}").reshape(1, -1, 1))
            positions = ops.convert(ops.unsqueeze(self.position_ids, ops.constant(1)), np.float32)
            angles = ops.transpose(ops.matmul(frequencies, positions, False, False), self._integers(0, 2, 1))
            angles = ops.concat([angles, angles], -1)
            cos, sin = (ops.unsqueeze(part, ops.constant(1)) for part in (ops.cos(angles), ops.sin(angles)))
            self.rotations[index] = cos, sin
        return self.rotations[index]

    def _rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        ops, half = self.ops, self.decoder.head_size // 2
        axis, step, end = self._integers(3), self._integers(1), self._integers(2**63 - 1)
        low = ops.slice(x, self._integers(0), self._integers(half), step, axis)
        high = ops.slice(x, self._integers(half), end, step, axis)
        turned = ops.concat([ops.multiply(high, ops.constant(np.float32(-1))), low], -1)
        return ops.add(ops.multiply(x, cos), ops.multiply(turned, sin))

    def _mask(self, window: int) -> Any:
        """The attention mask, [B, 1, S, T]; with a window, in the form from which GenAI reads the window's size."""
        if window not in self.masks:
            ops = self.ops
            new, total = (
                ops.gather(ops.shape_of(x), ops.constant(1), ops.constant(0))
                for x in (self.input_ids, self.attention_mask)
            )
            zero, one = ops.constant(np.int64(0)), ops.constant(np.int64(1))
            keys = ops.range(zero, total, one, "i64")
            queries = ops.unsqueeze(ops.range(ops.subtract(total, new), total, one, "i64"), ops.constant(1))
            seen = ops.less_equal(keys, queries)
            if window >= 0:
                everything = ops.constant(np.array(True))
                inside = ops.greater(keys, ops.add(queries, ops.constant(np.int64(-window))))
                inside = ops.bitwise_and(ops.bitwise_and(everything, inside), seen)
                seen = ops.bitwise_and(ops.bitwise_and(everything, inside), everything)
            batch = ops.gather(ops.shape_of(self.input_ids), self._integers(0), ops.constant(0))
            one_head = self._integers(1)
            lengths = [ops.unsqueeze(x, ops.constant(0)) for x in (new, total)]
            seen = ops.broadcast(seen, ops.concat([batch, one_head, *lengths], 0))
            mask = ops.select(seen, ops.constant(np.float32(0)), ops.constant(np.float32(np.finfo(np.float32).min)))
            self.masks[window] = ops.slice(mask, self._integers(0), lengths[1], self._integers(1), self._integers(3))
        return self.masks[window]

    def _norm(self, x: Any, weight: str) -> Any:
        ops = self.ops
        square = ops.power(x, ops.constant(np.float32(2)))
        mean = ops.reduce_mean(square, self._integers(-1), keep_dims=True)
        deviation = ops.sqrt(ops.add(mean, ops.constant(np.float32(self.decoder.norm_epsilon))))
        normalised = ops.multiply(x, ops.divide(ops.constant(np.float32(1)), deviation))
        return ops.multiply(ops.constant(self.decoder.vector(weight).astype(np.float32)), normalised)

    def _project(self, x: Any, name: str) -> Any:
        return self.ops.matmul(x, self._weight(name), False, True)

    def _weight(self, name: str) -> Any:
        """Compressed weights and the operators that decompress them: float32 [rows, columns]."""
        if name not in self.tables:
            ops, openvino = self.ops, self.openvino
            codes, scales = self.decoder.codes(name), self.decoder.scales(name)
            rows, groups = scales.shape
            # code - 8 in 4-bit two's complement, for both nibbles.
            signed = np.bitwise_xor(codes, 0x88)
            tensor = openvino.Tensor(signed.reshape(-1), openvino.Shape([rows, groups, _GROUP]), openvino.Type.i4)
            values = ops.convert(openvino.op.Constant(tensor, shared_memory=False), np.float16)
            values = ops.multiply(values, ops.constant(scales.reshape(rows, groups, 1)))
            values = ops.reshape(values, self._integers(rows, groups * _GROUP), special_zero=False)
            self.tables[name] = ops.convert(values, np.float32)
        return self.tables[name]

    def _parameter(self, name: str, shape: list[int], dtype: Any) -> Any:
        parameter = self.ops.parameter(shape, dtype)
        # GenAI looks up both names.
        parameter.set_friendly_name(name)
        parameter.output(0).set_names({name})
        return parameter

    def _integers(self, *values: int) -> Any:
        return self.ops.constant(np.array(values, np.int64))

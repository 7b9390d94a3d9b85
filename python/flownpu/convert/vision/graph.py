# SPDX-License-Identifier: Apache-2.0
"""Writes the ONNX graph of a vision tower, with the input that ORT GenAI feeds.

Shapes (N pictures of I x I pixels, F features of a picture, D the decoder's hidden size):

    pixel_values float32 [N, 3, I, I];  image_features float32 [N, F, D]

Patches are embedded by a convolution whose stride is its kernel's size. A layer is layer norm, packed QKV product,
non-causal attention, output product with the residual; layer norm, fc1 with GELU, fc2 with the residual. After the last
norm, patches are averaged, RMS-normalised and projected. Weights are initializers with the names in
`vision_weight_plan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from flownpu.convert.dense.graph import EncoderWriter
from flownpu.convert.vision.weights import vision_weight_plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.convert.dense.weights import DenseFormat
    from flownpu.convert.vision.tower import VisionTower


def build_vision_model(
    tower: VisionTower, tensors: Mapping[str, ir.TensorProtocol], dense_format: DenseFormat
) -> ir.Model:
    """The tower's ONNX model, with the functions that define its operators.

    Args:
        tower: what to write.
        tensors: each weight of `vision_weight_plan`, by name.
        dense_format: how the matrices among the weights are stored.
    """
    return _Builder(tower, tensors, dense_format).model()


class _Builder(EncoderWriter):
    def __init__(self, tower: VisionTower, tensors: Mapping[str, ir.TensorProtocol], dense_format: DenseFormat) -> None:
        super().__init__(tensors, vision_weight_plan(tower), dense_format, tower.norm_epsilon)
        self.tower = tower

    def model(self) -> ir.Model:
        tower = self.tower
        side = tower.image_size
        pixels = self._input("pixel_values", ir.DataType.FLOAT, ["num_images", tower.channels, side, side])
        hidden = self._patches(pixels)
        for i in range(tower.layers):
            hidden = self._layer(hidden, f"vision_tower.encoder.layers.{i}")
        features = self._project(self._layer_norm(hidden, "vision_tower.post_layernorm"))
        # Three dimensions make GenAI allocate [N, F, D]. For two it would allocate the features of only one picture.
        shape: list[int | str | None] = ["num_images", tower.tokens_per_image, tower.output_size]
        return self._model("vision", [self._output(features, "image_features", shape)])

    def _patches(self, pixels: ir.Value) -> ir.Value:
        """The embeddings of patches plus those of their positions, [N, P, Dv], where Dv is the tower's hidden size."""
        name, size = "vision_tower.embeddings", self.tower.patch_size
        inputs = [pixels, *(self._weight(f"{name}.patch_embedding.{part}") for part in ("weight", "bias"))]
        grid = self._op("Conv", inputs, f"{name}.patch_embedding", kernel_shape=[size] * 2, strides=[size] * 2)
        patches = self._tokens(grid, self.tower.patches, f"{name}.patches")
        return self._op("Add", [patches, self._weight(f"{name}.position_embedding.weight")], name)

    def _layer(self, hidden: ir.Value, layer: str) -> ir.Value:
        hidden = self._attention(self._layer_norm(hidden, f"{layer}.layer_norm1"), hidden, f"{layer}.self_attn")
        inner = self._linear(self._layer_norm(hidden, f"{layer}.layer_norm2"), f"{layer}.mlp.fc1", gelu="gelu_tanh")
        return self._linear(inner, f"{layer}.mlp.fc2", residual=hidden)

    def _attention(self, hidden: ir.Value, residual: ir.Value, name: str) -> ir.Value:
        qkv = self._linear(hidden, f"{name}.qkv_proj")
        output = self._attend(qkv, name, self.tower.heads, self.tower.head_size)
        return self._linear(output, f"{name}.out_proj", residual=residual)

    def _project(self, hidden: ir.Value) -> ir.Value:
        """The features that the decoder takes: pooled, normalised and projected, [N, F, D]."""
        tower, name = self.tower, "multi_modal_projector"
        sides = [0, tower.hidden_size, tower.patches_per_side, tower.patches_per_side]
        channels = self._op("Transpose", [hidden], f"{name}/channels", perm=[0, 2, 1])
        grid = self._op("Reshape", [channels, self._integers("grid_shape", sides)], f"{name}/grid")
        pool = [tower.pool_size] * 2
        pooled = self._op("AveragePool", [grid], f"{name}.avg_pool", kernel_shape=pool, strides=pool)
        tokens = self._tokens(pooled, tower.tokens_per_image, f"{name}/pooled")
        norm = f"{name}.mm_soft_emb_norm"
        normalised = self._op(
            "SimplifiedLayerNormalization",
            [tokens, self._weight(norm)],
            norm,
            axis=-1,
            epsilon=tower.norm_epsilon,
            stash_type=1,
        )
        return self._product(normalised, f"{name}.mm_input_projection")

    def _tokens(self, grid: ir.Value, count: int, name: str) -> ir.Value:
        """Turns a grid [N, C, h, w] into tokens [N, h w, C]; `count` is h w."""
        shape = self._integers(f"{name}/shape", [0, self.tower.hidden_size, count])
        return self._op("Transpose", [self._op("Reshape", [grid, shape], f"{name}/flat")], name, perm=[0, 2, 1])

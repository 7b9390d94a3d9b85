# SPDX-License-Identifier: Apache-2.0
"""Lists the weights of a decoder's graph, and the tensors of a checkpoint that each is made from."""

from flownpu.convert.weights.kinds import (
    BiasWeight,
    BlockPart,
    FloatWeight,
    HeadOrder,
    NormWeight,
    ProjectionWeight,
    RouterWeight,
    TensorSource,
    Weight,
    WeightSource,
)
from flownpu.convert.weights.plan import (
    DRAFTER,
    PER_LAYER_SCALE,
    embedding_table,
    per_layer_table,
    unused_tensors,
    weight_plan,
)
from flownpu.convert.weights.prediction_head import head_plan

__all__ = [
    "DRAFTER",
    "PER_LAYER_SCALE",
    "BiasWeight",
    "BlockPart",
    "FloatWeight",
    "HeadOrder",
    "NormWeight",
    "ProjectionWeight",
    "RouterWeight",
    "TensorSource",
    "Weight",
    "WeightSource",
    "embedding_table",
    "head_plan",
    "per_layer_table",
    "unused_tensors",
    "weight_plan",
]

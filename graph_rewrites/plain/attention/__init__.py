# SPDX-License-Identifier: Apache-2.0
"""Attention in its parts -> FlowQKVAttention.

`scaled_dot_product_attention` is the rule. It reads the graph from the softmax outwards, with `scores` (the product
before it, its scale and what is added), `mask` (which positions that leaves visible) and `operand` (where queries, keys
and values come from); `emitter` writes the operator.
"""

# SPDX-License-Identifier: Apache-2.0
"""Attention in its parts -> FlowQKVAttention.

`scaled_dot_product_attention` is the rule. It reads the graph from the softmax outwards, with `scores` (the product
before it, its scale and what is added), `mask` (the positions that these leave visible) and `operand` (the sources of
queries, keys and values); `emitter` writes the operator.
"""

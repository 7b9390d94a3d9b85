# SPDX-License-Identifier: Apache-2.0
"""Weights in float32 -> Q4NX.

`float_weight` finds such a weight and what it becomes, for the rules `projection`, `embedding` and `mixture`.
"""

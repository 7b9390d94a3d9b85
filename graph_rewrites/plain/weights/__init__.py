# SPDX-License-Identifier: Apache-2.0
"""Weights in float32 -> Q4NX.

`float_weight` finds such weights and makes their Q4NX initializers, for the rules `projection`, `embedding` and
`mixture`.
"""

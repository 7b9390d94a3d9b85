# SPDX-License-Identifier: Apache-2.0
"""Encoders' matrices, in bfloat16, int8 or Q4NX: the plan, the products of a graph, and what reads and writes them."""

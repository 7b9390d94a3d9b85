# SPDX-License-Identifier: Apache-2.0
"""Bounds of a graph's values, from samples of them in float64, operator by operator (see `samples`)."""

# SPDX-License-Identifier: Apache-2.0
"""Bounds of a graph's values by interval arithmetic in float64, operator by operator (see `bounds`)."""

# SPDX-License-Identifier: Apache-2.0
"""What a graph's values may be: interval arithmetic in float64, operator by operator (see `bounds`)."""

# SPDX-License-Identifier: Apache-2.0
"""The weights of encoders, whose matrices are in bfloat16, int8 or Q4NX: their plan, reading, writing, and products."""

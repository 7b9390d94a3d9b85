# SPDX-License-Identifier: Apache-2.0
"""A plan as MLIR of the AIE dialects."""

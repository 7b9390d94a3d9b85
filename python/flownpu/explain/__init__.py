# SPDX-License-Identifier: Apache-2.0
"""Explains FlowNPU's use of a model: placement of nodes with reasons, folded parts, and speed."""

# SPDX-License-Identifier: Apache-2.0
"""What designs must give: inputs, their operators' float64 references, and tolerances derived from the arithmetic."""

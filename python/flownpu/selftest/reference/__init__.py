# SPDX-License-Identifier: Apache-2.0
"""Expected results of designs: random inputs, float64 references, and tolerances derived from the arithmetic."""

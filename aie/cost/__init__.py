# SPDX-License-Identifier: Apache-2.0
"""The predicted cost of the designs' calls, from published numbers (docs/model.md); we measured none of them."""

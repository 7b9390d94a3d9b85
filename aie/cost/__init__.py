# SPDX-License-Identifier: Apache-2.0
"""What calls of the designs are predicted to cost: from published numbers (docs/model.md), none measured by us."""

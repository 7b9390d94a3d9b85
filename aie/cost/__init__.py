# SPDX-License-Identifier: Apache-2.0
"""What calls of the designs are predicted to cost. Nothing of it was measured by us; docs/model.md says from what."""

# SPDX-License-Identifier: Apache-2.0
"""Predictions of a model's speed on a chip, and how far predictions are from published measurements."""

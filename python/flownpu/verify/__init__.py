# SPDX-License-Identifier: Apache-2.0
"""Compares a model with its source, as a whole and layer by layer."""

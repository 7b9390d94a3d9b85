# SPDX-License-Identifier: Apache-2.0
"""Converts models of older opsets, and of other tools' forms, to the form that the rules read."""

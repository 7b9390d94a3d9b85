# SPDX-License-Identifier: Apache-2.0
"""Explains what FlowNPU makes of a model: what runs where and why, what is folded, and how fast it may be."""

# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of FlowNPU in turn with other engines, each in a process of its own."""

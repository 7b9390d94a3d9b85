# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of engines beside one another, each a process that keeps its model between measurements."""

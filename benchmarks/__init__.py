# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of single kernels. `flownpu bench` measures whole models."""

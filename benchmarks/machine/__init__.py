# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the machine and of single kernels on it, without a model's files."""

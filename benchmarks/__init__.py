# SPDX-License-Identifier: Apache-2.0
"""Benchmarks beside `flownpu bench`; each describes its use at its top.

`machine/`: a machine's limits and single kernels, without a model's files. `engines/`: FlowNPU in turn with other
engines and servers. The files in this folder measure parts and properties of one model.
"""

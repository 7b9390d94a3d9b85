# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of what `flownpu bench` does not measure; each says at its top how to run it.

`machine/`: a machine's limits and single kernels, without a model's files. `engines/`: FlowNPU in turn with other
engines and servers. The files in this folder measure parts and properties of one model.
"""

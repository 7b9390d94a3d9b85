# SPDX-License-Identifier: Apache-2.0
"""Benchmarks beside `flownpu bench`; each describes its use at its top.

`machine/`: a machine's limits and single kernels, without a model's files. `engines/`: FlowNPU in turn with other
engines and servers. The files in this folder measure parts and properties of one model.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime reads it when it is imported

# SPDX-License-Identifier: Apache-2.0
"""The ONNX graphs that conversion writes, and the files that hold them."""

# SPDX-License-Identifier: Apache-2.0
"""The operators of FlowNPU: as functions on arrays, their definitions and references, and (in C++) their kernels.

An operator has one stem in every folder: `definitions/fused_dqp.py` says what it computes, `cpu/fused_dqp*.cc` computes
it, and the function `fused_dqp` of this module calls that code.

    eager                 the operators as functions on arrays, which this module exports
    contracts             what operators accept, read from the C++
    q4nx                  the format of the weights: pack, unpack, dequantise, gather
    q4nx_quantize         computes codes, scales and minima of given weights
    q4nx_file             .q4nx files
    definitions           each operator's equation, ONNX function and float64 reference; adds to a model the ONNX
                          functions that its FlowNPU nodes need. Only this package needs onnx and onnx_ir
"""

from flownpu.ops import q4nx
from flownpu.ops.eager import flow_kv_attention, flow_qkv_attention, fused_dqp, q4nx_gather, q4nx_matmul

__all__ = ["flow_kv_attention", "flow_qkv_attention", "fused_dqp", "q4nx", "q4nx_gather", "q4nx_matmul"]

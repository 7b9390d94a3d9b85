# SPDX-License-Identifier: Apache-2.0
"""The operators of FlowNPU: definitions, references and (in C++, beside this file) kernels.

One operator is one stem: `fused_dqp.py` says what it computes, `fused_dqp.h` and `cpu/fused_dqp*.cc` compute it.

    q4nx                  the format of the weights: pack, unpack, dequantise, gather
    q4nx_quantize         codes, scales and minima of given weights
    q4nx_file             .q4nx files
    q4nx_matmul, fused_dqp, q4nx_gather, flow_qkv_attention, flow_kv_attention
                          each operator's equation, ONNX function and float64 reference
    definitions           gives a model the functions that its FlowNPU nodes need
"""

from flownpu.ops import q4nx

__all__ = ["q4nx"]

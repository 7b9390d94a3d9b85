# SPDX-License-Identifier: Apache-2.0
"""Rules that turn an exported graph into FlowNPU's operators.

Letters in the equations: B batch, S new tokens of a call, T total tokens, H query heads, G KV heads, d head
size, M rows of a weight (output features), K its columns (input features), V vocabulary.

`rewriter` is for what ORT GenAI's builder writes: the rules are the graph library's, in C++ (ops/lowering/), which a
session applies as well (`native_graph` calls them). `plain` is for plain graphs (optimum's): its rules fold their parts
into operators, then the graph library draws these together. A rule for plain graphs is a function in a file of its own,
whose docstring is the equation: it starts at the one operator that tells a part from others (Erf, Neg, Softmax, a mean
of squares) and follows its operands, whose order and place exporters choose freely; what it does not take
it leaves with a reason.
"""

from flownpu.graph_rewrites.report import Miss, Report
from flownpu.graph_rewrites.rewriter import rewrite

__all__ = ["Miss", "Report", "rewrite"]

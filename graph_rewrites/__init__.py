# SPDX-License-Identifier: Apache-2.0
"""Rules that turn an exported graph into FlowNPU's operators.

Letters in the equations: B batch, S new tokens of a call, T total tokens, H query heads, G KV heads, d head
size, M rows of a weight (output features), K its columns (input features), V vocabulary.

`rewriter` is for graphs of ORT GenAI's builder: their rules are in the graph library in C++ (ops/lowering/), which a
session applies too (`native_graph` calls them). `plain` is for plain graphs, such as optimum's: its rules fold their
parts into operators, which the graph library then fuses further. A rule for plain graphs is a function in a file of its
own, whose docstring is the equation. It starts at the operator that identifies a part (Erf, Neg, Softmax, a mean of
squares) and follows its operands, whose order and place differ between exporters; it leaves everything else, with a
reason.
"""

from flownpu.graph_rewrites.report import Miss, Report
from flownpu.graph_rewrites.rewriter import rewrite

__all__ = ["Miss", "Report", "rewrite"]

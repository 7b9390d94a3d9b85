# SPDX-License-Identifier: Apache-2.0
"""Rules that turn an exported graph into FlowNPU's operators.

One rule a file: `pattern` finds, `check` refuses with a reason, `rewrite` replaces; the docstring of the class is the
equation. Letters in the equations: B batch, S new tokens of a call, T total tokens, H query heads, G KV heads, d head
size, M rows of a weight (output features), K its columns (input features), V vocabulary.

`rewriter` has the rules for what ORT GenAI's builder writes, `plain_rewriter` those for plain graphs (optimum's). Of
the latter most are functions rather than patterns: they start at the one operator that tells a part from others (Erf,
Neg, Softmax, a mean of squares) and follow its operands, whose order and place exporters choose freely.
"""

from flownpu.graph_rewrites.report import Miss, Report
from flownpu.graph_rewrites.rewriter import rewrite

__all__ = ["Miss", "Report", "rewrite"]

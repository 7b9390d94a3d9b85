# SPDX-License-Identifier: Apache-2.0
"""The base of the rules that match a pattern."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from onnxscript.rewriter import MatchContext, MatchResult

from flownpu.graph_rewrites.signature import unknown_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from onnxscript.rewriter import RewriteRule

    class _RewriteRule:
        """The rewriter's base class, but for the methods whose parameters every rule chooses for itself."""

        def __init__(self, name: str) -> None: ...

        @classmethod
        def rule(cls) -> RewriteRule: ...

else:
    from onnxscript.rewriter import RewriteRuleClassBase as _RewriteRule

# What `pattern` and `rewrite` build operators with, by their names: op.Reshape(x, shape).
Builder: TypeAlias = Any


class Rule(_RewriteRule):
    """A rule named after its file, with `pattern`, `examine` and `rewrite`.

    `pattern` says what to find; its parameters, and the outputs that it names, are values of the graph, which `examine`
    and `rewrite` get by name. `examine` refuses with a reason; nodes with what no rule knows of are refused before it
    is asked. `rewrite` returns what takes the place of the outputs.
    """

    def __init__(self) -> None:
        super().__init__(type(self).__module__.rpartition(".")[2])

    examine: Callable[..., MatchResult]

    def check(self, context: MatchContext, **values: Any) -> MatchResult:
        """Called by the rewriter for what its pattern finds."""
        for node in context.nodes:
            if (part := unknown_part(node)) is not None:
                return MatchResult().fail(part, node)
        return self.examine(context, **values)

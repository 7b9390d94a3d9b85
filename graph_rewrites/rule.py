# SPDX-License-Identifier: Apache-2.0
"""The base of the rules that match a pattern."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
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
    """A rule named after its file, with `pattern`, `check` and `rewrite`.

    `pattern` says what to find; its parameters, and the outputs that it names, are values of the graph, which `check`
    and `rewrite` get by name. `check` refuses with a reason. `rewrite` returns what takes the place of the outputs.
    """

    def __init__(self) -> None:
        super().__init__(type(self).__module__.rpartition(".")[2])

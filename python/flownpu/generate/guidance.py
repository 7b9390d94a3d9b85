# SPDX-License-Identifier: Apache-2.0
"""Rules that an answer's text must follow, as ORT GenAI's guidance takes them."""

from dataclasses import dataclass

from flownpu.errors import FlowNPUError

__all__ = ["Guidance", "blamed"]

# By default llguidance tokenises text that a grammar leaves no choice about, even if it ends inside a character. GenAI
# 0.18 makes U+FFFD of such a piece, and the next token then violates the grammar: "€" could not be written with tokens
# of single bytes. Without forcing, the model chooses among all tokens that spell the text, and the text is not computed
# in advance, which took seconds for a pattern such as a{100000}.
_OPTIONS = '%llguidance {"no_forcing": true}\n'

# How messages of GenAI 0.18 begin if its guidance refuses a grammar or cannot go on with it.
_REFUSALS = ("Error creating grammar", "Error committing tokens", "Error computing mask")


@dataclass(frozen=True)
class Guidance:
    """A grammar that the answer's text must follow."""

    rules: str
    """In llguidance's dialect of Lark; the rule `start` is the whole text."""

    @property
    def genai_grammar(self) -> tuple[str, str]:
        """GenAI's name of the kind of grammar, and the grammar."""
        return "lark_grammar", _OPTIONS + self.rules


def blamed(error: Exception) -> Exception:
    """An error of GenAI's guidance as the request's fault, a FlowNPUError; any other error as it is."""
    message = str(error)
    if not message.startswith(_REFUSALS):
        return error
    # What follows are llguidance's state and the grammar's lines.
    reason = message.partition("\n")[0].removeprefix("Error creating grammar: ")
    reason = reason.rpartition("failed to compile JSON schema: ")[2]
    return FlowNPUError(f"GenAI's guidance cannot follow the grammar: {reason}")

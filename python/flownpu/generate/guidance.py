# SPDX-License-Identifier: Apache-2.0
"""Rules that an answer's text must follow, as ORT GenAI's guidance takes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flownpu.errors import FlowNPUError
from flownpu.generate.speculative.choice import ChoiceModel

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
    """A FlowNPUError for an error of GenAI's guidance, which is the request's fault; any other error as it is."""
    message = str(error)
    if not message.startswith(_REFUSALS):
        return error
    # The further lines are llguidance's state and the grammar.
    reason = message.partition("\n")[0].removeprefix("Error creating grammar: ")
    reason = reason.rpartition("failed to compile JSON schema: ")[2]
    return FlowNPUError(f"GenAI's guidance cannot follow the grammar: {reason}")


def rehearse(
    genai: Any,
    choices: ChoiceModel,
    guidance: Guidance,
    more: int,
    *,
    tokens: Sequence[int] = (),
    last: Sequence[int] = (),
) -> list[int]:
    """Generates tokens that follow a grammar, without a model: given ones, then up to `more` of the lowest ids.

    Args:
        genai: the module onnxruntime_genai.
        choices: has the vocabulary.
        guidance: the grammar.
        more: how many tokens to write behind the given ones.
        tokens: the given tokens.
        last: further tokens that are written only where the grammar allows no others.

    Returns:
        The tokens; where the text has ended, the one that ends it is the last.

    Raises:
        FlowNPUError: guidance does not take the grammar, or cannot go on with it.
    """

    def generator(model: Any) -> Any:
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(do_sample=False)
        parameters.set_guidance(*guidance.genai_grammar)
        return genai.Generator(model, parameters)

    try:
        choice = choices.choice(generator)
        choice.append(np.zeros(1, np.int32), np.zeros(choices.vocabulary, np.float32))
        written: list[int] = []
        while not choice.generator.is_done() and len(written) < len(tokens) + more:
            logits = np.zeros(choices.vocabulary, np.float32)
            logits[list(last)] = -1
            logits[list(tokens[len(written) : len(written) + 1])] = 1
            written.append(choice.next(logits))
    except RuntimeError as error:
        raise blamed(error) from error
    return written

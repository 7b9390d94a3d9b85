# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding (Leviathan et al. 2023): several tokens for one reading of the weights.

Candidates for the next tokens come from the text so far (`lookup.py`) or from a smaller model (`draft.py`). The model
computes the logits behind all of them in one run; GenAI then chooses token after token from these logits as it does
from those of single steps (`choice.py`), and candidates are kept as long as they are the tokens that it chose
(`generator.py`).
"""

# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding (Leviathan et al. 2023): several tokens for one reading of the weights.

Candidates for the next tokens come from the text so far (`lookup.py`) or from a smaller model (`draft.py`). The model
computes the logits after each candidate in one run. GenAI then chooses token after token from these logits, as from
those of single steps (`choice.py`). Candidates are kept as long as they equal the chosen tokens (`generator.py`).
"""

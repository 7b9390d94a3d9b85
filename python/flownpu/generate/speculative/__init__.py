# SPDX-License-Identifier: Apache-2.0
"""Several tokens for one reading of the weights: speculative decoding (Leviathan et al. 2023).

Candidates for the next tokens come from a text that has been before (`lookup.py`) or from a smaller model
(`draft.py`). The model computes the logits behind all of them in one run; GenAI then chooses token after token from
these logits as it does from those of single steps (`choice.py`), and candidates are kept as far as they are what it
chose (`generator.py`).
"""

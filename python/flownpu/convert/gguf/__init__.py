# SPDX-License-Identifier: Apache-2.0
"""GGUF files: their header, configuration, tokenizer and weights."""

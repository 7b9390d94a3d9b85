# SPDX-License-Identifier: Apache-2.0
"""Converts each kind of source, with a module for each: checkpoints, GGUF files, and folders that other tools wrote."""

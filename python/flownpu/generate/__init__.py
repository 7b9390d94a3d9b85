# SPDX-License-Identifier: Apache-2.0
"""Generates text from a model folder with ORT GenAI, for `flownpu run`, `chat`, `bench` and `serve`."""

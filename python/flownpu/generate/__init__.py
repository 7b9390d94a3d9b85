# SPDX-License-Identifier: Apache-2.0
"""Text from a model folder with ORT GenAI: what `flownpu run`, `chat`, `bench` and `serve` share."""

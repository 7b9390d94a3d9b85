# SPDX-License-Identifier: Apache-2.0
"""Text encoders like BERT: their description, the model families, their weights and their graph."""

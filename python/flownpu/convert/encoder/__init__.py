# SPDX-License-Identifier: Apache-2.0
"""Text encoders of BERT's form: their description, the families that have it, their weights and their graph."""

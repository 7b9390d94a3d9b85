# SPDX-License-Identifier: Apache-2.0
"""The commands of models that embed texts, or score pairs of them."""

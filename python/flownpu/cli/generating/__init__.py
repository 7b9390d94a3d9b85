# SPDX-License-Identifier: Apache-2.0
"""Commands that generate text in the terminal: one answer, and a conversation."""

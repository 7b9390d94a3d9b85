# SPDX-License-Identifier: Apache-2.0
"""Brings models of older opsets, and of forms that other tools write, to what the rules read."""

# SPDX-License-Identifier: Apache-2.0
"""A model in a process of its own: what the server tells it and hears of it."""

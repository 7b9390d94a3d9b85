# SPDX-License-Identifier: Apache-2.0
"""Turns a request's schema and tools into a grammar for GenAI's guidance, within bounds of time and memory."""

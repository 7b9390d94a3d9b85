# SPDX-License-Identifier: Apache-2.0
"""Requests as types: the fields of each API and their bounds, and how each becomes a request of OpenAI's API."""

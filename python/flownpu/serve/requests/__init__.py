# SPDX-License-Identifier: Apache-2.0
"""Requests as types: the fields of each API with their bounds, and the conversion to requests of OpenAI's API."""

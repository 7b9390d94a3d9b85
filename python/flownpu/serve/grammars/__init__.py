# SPDX-License-Identifier: Apache-2.0
"""From a request's schema and tools to a grammar that GenAI's guidance can follow, within bounds of time and memory."""

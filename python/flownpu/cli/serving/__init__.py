# SPDX-License-Identifier: Apache-2.0
"""Commands that answer many requests: from clients, and from a file."""

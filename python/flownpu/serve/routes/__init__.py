# SPDX-License-Identifier: Apache-2.0
"""The paths of each API and of the chat page: they take requests and write responses."""

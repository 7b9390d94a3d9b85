# SPDX-License-Identifier: Apache-2.0
"""The paths of each API, and the page: from a request to what is sent back."""

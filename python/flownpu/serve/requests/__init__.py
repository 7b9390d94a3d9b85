# SPDX-License-Identifier: Apache-2.0
"""What clients may ask, as types: the fields of each API, their bounds, and the same in the words of one of them."""

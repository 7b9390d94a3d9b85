# SPDX-License-Identifier: Apache-2.0
"""Files of 64-bit words, which Python writes (writer.py) and C++ reads (reader.h) without a library."""

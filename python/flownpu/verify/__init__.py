# SPDX-License-Identifier: Apache-2.0
"""A model compared with its source, as a whole and layer by layer."""

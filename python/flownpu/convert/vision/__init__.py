# SPDX-License-Identifier: Apache-2.0
"""Encoders of images: their configuration, weights and graph, and the preparation of pictures for them."""

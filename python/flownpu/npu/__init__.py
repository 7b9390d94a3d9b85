# SPDX-License-Identifier: Apache-2.0
"""A model on the NPU: the sizes of its decoder and encoder, their programs, and the artifacts' folder."""

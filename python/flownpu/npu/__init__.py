# SPDX-License-Identifier: Apache-2.0
"""What the NPU is given of a model: the sizes of its decoder and encoder, their programs, and their folder."""

# SPDX-License-Identifier: Apache-2.0
"""What the NPU needs of a model: the sizes of its decoder and encoder, their programs, and the artifacts' folder."""

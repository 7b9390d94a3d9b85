# SPDX-License-Identifier: Apache-2.0
"""Folders of designs that were compiled for an NPU, or made flat for the emulator, with their index."""

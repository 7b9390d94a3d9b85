# SPDX-License-Identifier: Apache-2.0
"""Folders of what designs became: compiled for an NPU, or flat for the emulator, with their index."""

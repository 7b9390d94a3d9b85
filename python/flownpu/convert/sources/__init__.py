# SPDX-License-Identifier: Apache-2.0
"""What can be converted, one module for each: checkpoints, GGUF files, and folders of others."""

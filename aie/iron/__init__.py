# SPDX-License-Identifier: Apache-2.0
"""IRON, recorded: designs written for mlir-aie become plans, without mlir-aie."""

# SPDX-License-Identifier: Apache-2.0
"""A model's files, as FlowNPU writes and reads them: the folder, its graph, its weights, its checksums."""

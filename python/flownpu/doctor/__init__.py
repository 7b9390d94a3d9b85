# SPDX-License-Identifier: Apache-2.0
"""The checks of `flownpu doctor`: the needs of FlowNPU, the missing parts, and the command for each remedy."""

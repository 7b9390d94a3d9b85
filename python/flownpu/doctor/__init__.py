# SPDX-License-Identifier: Apache-2.0
"""The checks of `flownpu doctor`: what FlowNPU needs, what of it is missing, and the command that mends it."""

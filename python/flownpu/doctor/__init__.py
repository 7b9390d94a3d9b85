# SPDX-License-Identifier: Apache-2.0
"""What is there of what FlowNPU needs, what is missing, and the command that mends it."""

# SPDX-License-Identifier: Apache-2.0
"""NPU programs as plans: what the hardware allows, how a design becomes a plan, how a plan is checked and printed."""

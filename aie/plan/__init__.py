# SPDX-License-Identifier: Apache-2.0
"""The plan, an NPU program as data; the hardware's limits, and a plan's use of them."""

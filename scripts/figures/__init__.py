# SPDX-License-Identifier: Apache-2.0
"""Scripts that draw docs/figures: pictures of real output, of designs' plans, and of the chat page."""

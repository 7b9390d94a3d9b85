# SPDX-License-Identifier: Apache-2.0
"""What draws docs/figures: pictures of real output, of the plans, and of the chat page."""

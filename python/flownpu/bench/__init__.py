# SPDX-License-Identifier: Apache-2.0
"""How fast models run: engines and servers side by side, the memory roof of a decode step, traces."""

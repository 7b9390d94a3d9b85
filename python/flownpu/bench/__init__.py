# SPDX-License-Identifier: Apache-2.0
"""How fast models run: engines side by side, the roof of a decode step, traces."""

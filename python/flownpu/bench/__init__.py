# SPDX-License-Identifier: Apache-2.0
"""The speed of models: engines and servers side by side, the memory roof of a decode step, traces."""

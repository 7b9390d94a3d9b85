# SPDX-License-Identifier: Apache-2.0
"""Commands for models by name: downloads, converts, lists and removes them."""

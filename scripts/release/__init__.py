# SPDX-License-Identifier: Apache-2.0
"""Scripts for a release: they build wheels for old systems, check what is in them, and run the steps of a release."""

# SPDX-License-Identifier: Apache-2.0
"""Scripts for a release: they build wheels for old systems, check their contents, and try them on other systems."""

# SPDX-License-Identifier: Apache-2.0
"""What makes a release: wheels for old systems, what is looked at in them, and the list that a release goes through."""

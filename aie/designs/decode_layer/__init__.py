# SPDX-License-Identifier: Apache-2.0
"""A decoder layer as one design: from the residual stream to the next, for one token."""

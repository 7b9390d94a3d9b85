# SPDX-License-Identifier: Apache-2.0
"""A model in a process of its own: both ends of the connection between it and the server."""

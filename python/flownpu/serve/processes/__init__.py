# SPDX-License-Identifier: Apache-2.0
"""A model in a separate process: both ends of the connection between it and the server."""

# SPDX-License-Identifier: Apache-2.0
"""The host's work for a prompt, a token or an image, as data: the only place that knows an order of calls."""

# SPDX-License-Identifier: Apache-2.0
"""What a model is predicted to take on a chip, and how far off predictions are of what was published."""

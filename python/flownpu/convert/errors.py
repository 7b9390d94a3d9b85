# SPDX-License-Identifier: Apache-2.0
"""The error of a conversion that cannot be done."""

from flownpu.errors import FlowNPUError


class ConversionError(FlowNPUError):
    """The source cannot be converted, or the output cannot be written. Names the file or tensor, and what to do."""

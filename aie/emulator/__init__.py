# SPDX-License-Identifier: Apache-2.0
"""Runs plans element by element on a model of the array, with kernels compiled for this machine.

The C++ beside these files is the emulator, independent of Python. `flatten` turns a plan into the emulator's form.
"""

from flownpu.aie.emulator.emulator import Emulator
from flownpu.aie.emulator.flatten import FlatArray, flatten_array

__all__ = ["Emulator", "FlatArray", "flatten_array"]

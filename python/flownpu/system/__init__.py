# SPDX-License-Identifier: Apache-2.0
"""Functions that differ between operating systems: each system's module defines the same names.

Their counterparts in C++ are in `ops/system/`.
"""

import sys

if sys.platform == "win32":
    from flownpu.system import windows as own
else:
    from flownpu.system import linux as own

IS_WINDOWS = sys.platform == "win32"
ENDING_SIGNALS = own.ENDING_SIGNALS
NEW_GROUP = own.NEW_GROUP
OPENCL_LOADER = own.OPENCL_LOADER
connect_to_parent = own.connect_to_parent
end_with_children = own.end_with_children
keep_on = own.keep_on
library_file = own.library_file
limit_memory = own.limit_memory
lock = own.lock
open_to_lock = own.open_to_lock
prepare_streams = own.prepare_streams
processor = own.processor
start_connected = own.start_connected

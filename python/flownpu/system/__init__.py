# SPDX-License-Identifier: Apache-2.0
"""What each operating system has in its own way: a module for each, with the same names, and here those of this one.

The C++ has its own in `ops/system/`.
"""

import sys

if sys.platform == "win32":
    from flownpu.system.windows import *  # noqa: F403 what `__all__` names
else:
    from flownpu.system.linux import *  # noqa: F403 likewise

IS_WINDOWS = sys.platform == "win32"

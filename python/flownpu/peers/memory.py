# SPDX-License-Identifier: Apache-2.0
"""How much memory an engine's process takes. Standard library only, for it runs in the engine's environment."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

__all__ = ["memory"]


if sys.platform == "win32":

    class _Counters(ctypes.Structure):
        """PROCESS_MEMORY_COUNTERS_EX of Windows: sizes in bytes."""

        _fields_ = (
            ("cb", ctypes.c_uint32),
            ("PageFaultCount", ctypes.c_uint32),
            *(
                (name, ctypes.c_size_t)
                for name in (
                    *("PeakWorkingSetSize", "WorkingSetSize", "QuotaPeakPagedPoolUsage", "QuotaPagedPoolUsage"),
                    *("QuotaPeakNonPagedPoolUsage", "QuotaNonPagedPoolUsage", "PagefileUsage", "PeakPagefileUsage"),
                    "PrivateUsage",
                )
            ),
        )

    def memory() -> dict[str, int]:
        """Resident bytes of this process: all, those that no file backs, and the most there were."""
        counters = _Counters(cb=ctypes.sizeof(_Counters))
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.GetCurrentProcess.restype = ctypes.c_void_p
        kernel.K32GetProcessMemoryInfo.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
        if not kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb):
            raise ctypes.WinError(ctypes.get_last_error())
        return {
            "resident": counters.WorkingSetSize,
            "anonymous": counters.PrivateUsage,
            "peak": counters.PeakWorkingSetSize,
        }

else:

    def memory() -> dict[str, int]:
        """Resident bytes of this process: all, those that no file backs, and the most there were."""
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        kib = {key: int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "RssAnon", "VmHWM")}
        return {"resident": kib["VmRSS"], "anonymous": kib["RssAnon"], "peak": kib["VmHWM"]}

# SPDX-License-Identifier: Apache-2.0
"""The package as Windows' Python would import it: without what only POSIX systems have."""

import json
import subprocess
import sys

# Runs in a separate process: imports all modules once, so that other packages are loaded, and then simulates Windows.
SCRIPT = """
import importlib, json, os, pkgutil, signal, subprocess, sys, types

import flownpu
names = [module.name for module in pkgutil.walk_packages(flownpu.__path__, "flownpu.")]
names = [name for name in names if name != "flownpu.system.linux" and ".libflownpu_" not in name]
for name in names:
    if name != "flownpu.system.windows":
        importlib.import_module(name)
for name in list(sys.modules):
    if name.split(".")[0] == "flownpu" and name != "flownpu._native":
        del sys.modules[name]

for name in ("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None  # an import raises ModuleNotFoundError
for module, attributes in {
    os: ("EX_OK", "fork", "geteuid", "getuid", "killpg", "mkfifo", "sched_getaffinity", "sched_setaffinity", "uname"),
    signal: ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "alarm", "pthread_sigmask", "setitimer"),
}.items():
    for attribute in attributes:
        delattr(module, attribute)
sys.modules["msvcrt"] = types.ModuleType("msvcrt")
sys.modules["winreg"] = types.ModuleType("winreg")
signal.SIGBREAK = signal.SIGTERM
subprocess.CREATE_NEW_PROCESS_GROUP = 0x200
sys.platform = "win32"

failed = {}
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
system = sys.modules["flownpu.system"]
print(json.dumps({"count": len(names), "failed": failed, "is_windows": system.IS_WINDOWS,
                  "library": sys.modules["flownpu.registration"].LIBRARY_NAME}))
"""


def test_modules_are_imported_without_posix():
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["failed"] == {}
    assert said["count"] > 200
    assert said["is_windows"]
    assert said["library"] == "flownpu_ep.dll"

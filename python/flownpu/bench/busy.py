# SPDX-License-Identifier: Apache-2.0
"""Other work, beside which engines are measured: processes that keep cores busy."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from flownpu.system import NEW_GROUP

# Ends with its parent, even one that is killed (on Linux, where an orphan gets another parent).
_LOOP = """
import os, sys
print(flush=True)
while os.getppid() == int(sys.argv[1]):
    sum(range(100_000))
"""


@contextmanager
def busy_cores(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs `count` processes that compute without a pause, at the usual priority and bound to no core; yields them."""
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            command = [sys.executable, "-S", "-c", _LOOP, str(os.getpid())]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, **NEW_GROUP))
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()  # it runs
            processes.append(process)
        yield processes

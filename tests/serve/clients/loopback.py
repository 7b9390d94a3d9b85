# SPDX-License-Identifier: Apache-2.0
"""Runs a client's script, and ends it at once if it tries to reach anything but the loopback address.

python -m tests.serve.clients.loopback SCRIPT ADDRESS
"""

import os
import runpy
import sys
from typing import Any


def only_loopback(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook of Python: it sees look-ups of names and connections before they are made."""
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in {None, "localhost", "127.0.0.1", "::1"}:
        print(f"a client tried to reach {host}", file=sys.stderr, flush=True)
        os._exit(3)


if __name__ == "__main__":
    sys.addaudithook(only_loopback)
    name = sys.argv.pop(1)
    runpy.run_module(f"tests.serve.clients.{name}", run_name="__main__")

# SPDX-License-Identifier: Apache-2.0
"""The process that compiles grammars: `python -m flownpu.serve.grammars.host`, started by `GrammarProcess`.

It receives an `AnswerForm`, and sends a `Grammar` or an exception. It ends when the connection does.
"""

import os
import signal

from flownpu.errors import FlowNPUError
from flownpu.serve.grammars.compiler import Compiler
from flownpu.system import connect_to_parent


def main() -> None:
    """Runs until the connection ends."""
    # Ctrl-C and a service manager's SIGTERM reach every process of a group, but the server decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = connect_to_parent()
    try:
        compiler = Compiler()
        connection.send(None)  # ready
        while True:
            try:
                connection.send(compiler.compile(connection.recv()))
            except FlowNPUError as error:
                connection.send(FlowNPUError(str(error)))
            except RecursionError:
                connection.send(FlowNPUError("the schema is nested too deeply"))
            except (EOFError, OSError):
                raise
            except Exception as error:  # noqa: BLE001 a bug here, which the server reports
                connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    main()

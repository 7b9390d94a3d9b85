# SPDX-License-Identifier: Apache-2.0
"""The command line `flownpu`: one file a command.

The commands take a second to import, in which Ctrl-C is as quiet as later: they are imported when one is run.
"""

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; the process's own if none is given.

    Returns:
        The exit code: 0, 1 if the command failed, 2 if it was not understood, 130 after Ctrl-C, 143 after SIGTERM.
    """
    try:
        from flownpu.cli.application import run_command  # noqa: PLC0415

        return run_command(arguments)
    except KeyboardInterrupt:
        return 130

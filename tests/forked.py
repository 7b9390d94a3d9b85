# SPDX-License-Identifier: Apache-2.0
"""Runs a function in a child made by fork(), as gunicorn's and torch's DataLoader's workers are made."""

import multiprocessing
from collections.abc import Callable
from typing import Any

# A child that hangs is ended after so many seconds; the others take less than one.
PATIENCE = 30


def in_child(work: Callable[[], Any]) -> Any:
    """The result of `work`, or the text of its exception.

    Raises:
        AssertionError: the child does not end, or ends without a result.
    """
    context = multiprocessing.get_context("fork")
    ours, childs = context.Pipe(duplex=False)

    def run() -> None:
        try:
            childs.send(work())
        except Exception as error:  # noqa: BLE001  # any: it is the result
            childs.send(str(error))

    child = context.Process(target=run)
    child.start()
    childs.close()
    try:
        assert ours.poll(PATIENCE), "the child hangs"
        return ours.recv()
    except EOFError:
        raise AssertionError(f"the child ended without a result: {child.exitcode}") from None
    finally:
        child.kill()
        child.join()

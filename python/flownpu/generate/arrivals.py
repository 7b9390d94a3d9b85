# SPDX-License-Identifier: Apache-2.0
"""How requests come to a worker's thread, whatever computes them there."""

import queue
import threading
from collections import deque
from collections.abc import Callable

from flownpu.errors import FlowNPUError
from flownpu.generate.worker import Deliver, Finished, Request

__all__ = ["Arrivals"]


class Arrivals:
    """Requests, and what is said of them later, from any thread to one.

    `submit`, `cancel` and `close` are for any thread; all else is for the worker's.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[Request, Deliver]] = deque()
        """Those that have come and not begun, the first one first."""
        self._queue: queue.SimpleQueue[tuple[Request, Deliver] | Request | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()  # of `_closed` together with what is put after it

    def submit(self, request: Request, deliver: Deliver) -> None:
        """See `Worker.submit`."""
        with self._lock:
            if self._closed:
                raise FlowNPUError("the model is being closed: send the request again")
            self._queue.put((request, deliver))

    def cancel(self, request: Request) -> None:
        """See `Worker.cancel`."""
        self._queue.put(request)

    def close(self) -> None:
        """No request comes any more, and `take` says so."""
        with self._lock:
            self._closed = True
            self._queue.put(None)

    def take(self, cancel: Callable[[Request], None], *, idle: bool) -> bool:
        """Takes what has come; one that waits and is cancelled ends, of others `cancel` is told.

        Args:
            cancel: ends a request that has begun.
            idle: there is nothing to compute: waits until something comes.

        Returns:
            Whether to go on: False after `close`.
        """
        idle = idle and not self.waiting
        while True:
            try:
                arrival = self._queue.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if arrival is None:
                return False
            if not isinstance(arrival, Request):
                self.waiting.append(arrival)
                continue
            for waiting in [waiting for waiting in self.waiting if waiting[0] is arrival]:
                self.waiting.remove(waiting)
                _end(*waiting)
            cancel(arrival)

    def end_waiting(self) -> None:
        """Ends those that have not begun."""
        while self.waiting:
            _end(*self.waiting.popleft())


def _end(request: Request, deliver: Deliver) -> None:
    deliver(Finished("cancelled", len(request.tokens), 0, 0))

# SPDX-License-Identifier: Apache-2.0
"""The queue between the threads that submit requests and the thread of a worker, of either kind."""

import queue
import threading
from collections import deque
from collections.abc import Callable

from flownpu.errors import FlowNPUError
from flownpu.generate.worker import Deliver, Finished, Request


class RequestQueue:
    """Passes requests, cancellations and the closing from any thread to the worker's.

    `submit`, `cancel` and `close` may be called from any thread, everything else from the worker's only.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[Request, Deliver]] = deque()
        """Requests that have come and not begun, in the order in which they came."""
        self._queue: queue.SimpleQueue[tuple[Request, Deliver] | Request | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()  # so that nothing is queued behind the None of `close`

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
        """Refuses further requests, and makes `take` return False."""
        with self._lock:
            self._closed = True
            self._queue.put(None)

    def take(self, cancel: Callable[[Request], None], *, idle: bool) -> bool:
        """Takes what has come: requests into `waiting`; cancelled ones that wait there end at once.

        Args:
            cancel: called with each cancelled request; ends it if it has begun.
            idle: whether there is nothing to compute: then, if nothing waits either, blocks until something comes.

        Returns:
            False after `close`, else True.
        """
        idle = idle and not self.waiting
        while True:
            try:
                message = self._queue.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if message is None:
                return False
            if not isinstance(message, Request):
                self.waiting.append(message)
                continue
            for waiting in [waiting for waiting in self.waiting if waiting[0] is message]:
                self.waiting.remove(waiting)
                _end(*waiting)
            cancel(message)

    def end_waiting(self) -> None:
        """Ends the requests that have not begun."""
        while self.waiting:
            _end(*self.waiting.popleft())


def _end(request: Request, deliver: Deliver) -> None:
    deliver(Finished("cancelled", len(request.tokens), 0, 0))

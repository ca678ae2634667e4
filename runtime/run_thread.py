"""Runs calls on one and the same thread, whichever threads ask.

In: calls. Out: their results. ONNX Runtime's CUDA provider keeps captured graphs, and a cuBLAS handle, for each thread
that ever ran a session with graphs enabled; so one thread must do all the runs.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class RunThread:
    """The caller's own thread for as long as all calls come from one, then a thread of its own for good.

    Handing a call over costs some ten microseconds, which a program with one thread does not pay. Calls must not
    overlap; a caller waits for its call.
    """

    def __init__(self) -> None:
        self._has_caller = False
        self._local = threading.local()  # not thread numbers: those of threads that have ended are given again
        self._executor: ThreadPoolExecutor | None = None

    def __call__(self, call: Callable[[], None]) -> None:
        """Run `call` and return when it is done; raises what it raises."""
        if self._executor is not None:
            self._executor.submit(call).result()
            return
        if not self._has_caller:
            self._has_caller = self._local.is_caller = True
        if getattr(self._local, "is_caller", False):
            call()
            return
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="graphport-run")
        self._executor.submit(call).result()

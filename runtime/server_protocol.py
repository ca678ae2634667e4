"""HTTP/1.1 of uvicorn, with an end to waiting for a request's headers, and for a reader that does not read.

In: bytes of a connection. Out: as uvicorn's. uvicorn 0.54 waits for both without end; only between two requests of a
connection it has a time-out, which the first byte stops.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """Closes a connection on which no whole request head came within `head_timeout` seconds.

    What has been written and not been taken is cut off `send_timeout` seconds after it filled the buffer (64 KiB), or
    after the connection was to be closed.
    """

    head_timeout = 30.0
    send_timeout = 60.0

    @classmethod
    def within(cls, *, head_timeout: float, send_timeout: float) -> type["PatientProtocol"]:
        """The protocol with its time-outs; uvicorn makes one of this class for each connection."""
        return type("PatientProtocol", (cls,), {"head_timeout": head_timeout, "send_timeout": send_timeout})

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """A connection begins: its head is waited for."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Bytes came: part of a head, or of a body, or a whole head."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._head_timer is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._stop_waiting()
        self._stop_sending()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The buffer is full: its reader has a while to make room."""
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        """There is room again."""
        self._stop_sending()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing more is asked; what has not been taken is not kept for ever."""
        super().timeout_keep_alive_handler()
        self._abort_later()

    def _abort_later(self) -> None:
        self._stop_sending()
        self._send_timer = self.loop.call_later(self.send_timeout, self.transport.abort)

    def _stop_sending(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

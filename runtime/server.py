"""OpenAI-compatible HTTP for open models: a socket, uvicorn, and an end that loses nothing.

In: bundles by name and settings. Out: a server that runs until it is told to end. It answers nothing itself (see
`server_app.py`).
"""

import logging
import socket
import time
from collections.abc import Callable, Mapping
from types import FrameType

import uvicorn

from graphport.runtime.encoder import Encoder
from graphport.runtime.language_model import LanguageModel
from graphport.runtime.server_app import ServerApp
from graphport.runtime.server_models import Models
from graphport.runtime.server_protocol import PatientProtocol
from graphport.runtime.server_settings import ServerSettings

_log = logging.getLogger(__name__)

_BACKLOG = 1024
_LAST_SECONDS = 5  # for connections to close, once everything is answered
_KEEP_ALIVE = 30  # seconds that an idle connection may stay


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError, saying which address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host} port {port} ({error.strerror or error}); choose another --host or --port"
        ) from error


class Server:
    """Serves open models on a socket; it owns both, and closes them at its end.

    `begin_to_end` (which SIGTERM and SIGINT call) refuses new requests with 503, lets those that run end, `grace`
    seconds at most, and then stops; a second signal stops at once.
    """

    def __init__(
        self, opened: Mapping[str, LanguageModel | Encoder], listening: socket.socket, settings: ServerSettings
    ) -> None:
        self._models = Models(opened, settings)
        self._socket = listening
        self.app = ServerApp(self._models, settings)
        self._uvicorn = _Uvicorn(self.app, self._models, settings)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Serve until told to end. `on_ready` is called when the first request can be answered."""
        self._uvicorn.on_ready = on_ready
        self._uvicorn.run(sockets=[self._socket])

    def begin_to_end(self) -> None:
        """Refuse new requests and stop when those that run have ended. May be called from any thread."""
        self._uvicorn.begin_to_end()


class _Uvicorn(uvicorn.Server):
    def __init__(self, app: ServerApp, models: Models, settings: ServerSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=PatientProtocol.within(head_timeout=settings.read_timeout, send_timeout=settings.send_timeout),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_LAST_SECONDS,
            )
        )
        self.on_ready: Callable[[], None] | None = None
        self._app = app
        self._models = models
        self._grace = settings.grace
        self._last_moment: float | None = None

    def begin_to_end(self) -> None:
        if not self._app.is_draining:
            _log.info("stopping: %d requests run", self._app.num_running)
            self._last_moment = time.monotonic() + self._grace
            self._app.is_draining = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first ends it gently, the next at once."""
        if self._app.is_draining:
            super().handle_exit(sig, frame)
            self.force_exit = True
        else:
            self.begin_to_end()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.on_ready is not None:
            self.on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to stop."""
        is_over = await super().on_tick(counter)
        if self._last_moment is None:
            return is_over
        is_late = time.monotonic() >= self._last_moment
        if is_late and self._app.num_running:
            _log.warning("stopping: %d requests are cut off after %g s", self._app.num_running, self._grace)
        return is_over or is_late or not self._app.num_running

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._app.num_running:  # cut off: end them first, so that their callers are told
            await self._models.close()
        await super().shutdown(sockets)
        await self._models.close()
        _log.info("stopped")


def raise_file_limit() -> None:
    """Allow as many open connections as the system lets this process have. Where there are no such limits, nothing."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

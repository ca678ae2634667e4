"""Limits of a server and the keys that its callers need.

In: numbers and a file of keys. Out: `ServerSettings`, checked before anything is opened. It serves nothing.
"""

import hashlib
import hmac
import math
import numbers
from dataclasses import dataclass, field
from pathlib import Path

_SHORTEST_KEY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What a server allows; times in seconds.

    max_queue: sequences of one model that may wait beside those that run. max_body_bytes: of a request.
    request_timeout: for one request from its arrival to its last token; callers may ask for less. read_timeout: for
    headers, and for a body. send_timeout: for a client to take the next piece of an answer. grace: for what runs when
    the server is told to stop. api_keys: one of them must come with each request for a model; none: nobody is asked.

    Raises TypeError and ValueError by name.
    """

    max_queue: int = 64
    max_body_bytes: int = 4 << 20
    request_timeout: float = 600.0
    read_timeout: float = 30.0
    send_timeout: float = 60.0
    grace: float = 30.0
    api_keys: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name, low in (("max_queue", 0), ("max_body_bytes", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise TypeError(f"{name} must be a whole number from {low}; got {value!r}")
            if value < low:
                raise ValueError(f"{name} must be a whole number from {low}; got {value}")
        for name in ("request_timeout", "read_timeout", "send_timeout", "grace"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number of seconds above 0; got {value!r}")
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number of seconds above 0; got {value}")
        if any(len(key) < _SHORTEST_KEY for key in self.api_keys):
            raise ValueError(f"an API key is shorter than {_SHORTEST_KEY} characters, which can be guessed; use longer")

    def admits(self, key: str | None) -> bool:
        """Whether a caller with `key` may use the models. It takes the same time for every wrong key of one length."""
        if not self.api_keys:
            return True
        given = hashlib.sha256((key or "").encode("utf-8", "surrogatepass")).digest()
        digests = [hashlib.sha256(each.encode("utf-8", "surrogatepass")).digest() for each in self.api_keys]
        return sum([hmac.compare_digest(given, digest) for digest in digests]) > 0  # a list: no early end


def read_api_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and those that begin with # are none. Raises OSError, ValueError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error}); it should hold one API key a line") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ValueError(f"{path} holds no API key; write one a line, or leave the option out to ask for none")
    return keys

"""The log of a server: one JSON object a line, with what was asked of which model and how it went, and no text of it.

In: log records. Out: lines. Messages of exceptions are left out, because they quote what callers sent; their types and
the places in the code are kept.
"""

import json
import logging
import time
import traceback
from dataclasses import asdict, dataclass


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What a line says about one request; filled in on its way. `outcome` is "done", "refused", "failed" or "gone"."""

    request_id: str
    method: str
    route: str
    status: int | None = None
    seconds: float | None = None
    outcome: str = "done"
    model: str | None = None
    stream: bool | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    code: str | None = None
    param: str | None = None


class JsonLines(logging.Formatter):
    """Formats records; the fields of a RequestRecord given as `extra={"request": ...}` become the line's own."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        request = getattr(record, "request", None)
        if isinstance(request, RequestRecord):
            line |= {name: value for name, value in asdict(request).items() if value is not None}
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = type(error).__name__
            line["at"] = [
                f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)
            ]
        return json.dumps(line)


def log_as_json(*, debug: bool = False) -> None:
    """Write the process's log as JSON lines on stderr. Of uvicorn's, warnings alone."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(handlers=[handler], force=True, level=logging.WARNING)
    logging.getLogger("graphport").setLevel(logging.DEBUG if debug else logging.INFO)

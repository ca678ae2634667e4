"""What a server answers when it does not do what was asked, in OpenAI's form.

In: errors of the library, or a refusal. Out: `ApiError`, which has a status and a body. It sends nothing.
"""

from typing import Any

from graphport.runtime.chat_template_error import ChatTemplateError
from graphport.runtime.constraints import ConstraintError
from graphport.runtime.memory import NotEnoughMemoryError

_LONGEST = 400  # characters of a message: values that callers gave are quoted in it
_LONGEST_NAME = 200  # of a field


class ApiError(Exception):
    """A refusal or failure. `param`: the field to blame. `code`: a word for programs. `retry_after`: in seconds.

    `allow`: the methods that a path takes.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(_shortened(" ".join(message.split()), _LONGEST))
        self.status = status
        self.param = None if param is None else _shortened(param, _LONGEST_NAME)
        self.code = code
        self._headers = {"allow": allow, "retry-after": None if retry_after is None else str(retry_after)}

    def body(self) -> dict[str, Any]:
        """The record that OpenAI's clients read."""
        return {"error": {"message": str(self), "type": _kind(self.status), "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        headers = {name: value for name, value in self._headers.items() if value is not None}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (408, 413):
            headers["connection"] = "close"  # the rest of the body is not read
        return headers


def _shortened(text: str, most: int) -> str:
    """`text` with what is too much of it left out in the middle: it begins with the field, and ends with the advice."""
    half = (most - len(" ... ")) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}
    return kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")


def refusal(error: Exception, param: str | None) -> ApiError:
    """The answer to a request that the library refused before it ran; `param` is the field that it was about."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NotEnoughMemoryError):
        return ApiError(400, f"the request can never fit: {error}", param=param, code="not_enough_memory")
    code = "invalid_type" if isinstance(error, TypeError) else "invalid_value"
    return ApiError(400, str(error), param=param, code=code)


def failure(error: Exception) -> ApiError:
    """The answer to a request that failed while it ran; what is not for callers is not told."""
    match error:
        case ApiError():
            return error
        case ConstraintError():
            param = "response_format" if error.field == "json_schema" else error.field
            return ApiError(400, str(error), param=param, code="constraint_failed")
        case ChatTemplateError():
            return ApiError(400, str(error), param=error.field, code="invalid_value")
        case FloatingPointError():  # of logits, or of an encoder's hidden states
            return ApiError(500, str(error), code="model_overflow")
        case MemoryError():
            return ApiError(503, f"memory ran out: {error}", code="not_enough_memory", retry_after=5)
    return ApiError(500, "the server failed; its log says where, under this request's x-request-id", code="internal")

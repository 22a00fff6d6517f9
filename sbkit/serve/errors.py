"""Errors in OpenAI's format, so that the official client raises what its users expect."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sbkit.errors import SbkitError
from sbkit.infer.device import OutOfMemory

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

INVALID, SERVER, BUSY = "invalid_request_error", "server_error", "requests"
#: Codes for which OpenAI has another name.
_OPENAI_CODES = {"bad-value": "invalid_value"}


class ApiError(Exception):
    """An error that is sent to the client.

    status : HTTP status; the client retries 408, 409, 429 and 5xx
    code : names its cause for programs, spelt as OpenAI spells its own: ``invalid_api_key``. A code of OpenAI's is used
        where one fits; ``sbkit explain CODE`` tells more about each
    message : what is wrong and what to do
    param : the field that is wrong
    headers : additional headers
    """

    def __init__(self, status: int, code: str, message: str, *, type: str = INVALID, param: str | None = None,
                 headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.type = type
        self.param = param
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        from starlette.responses import JSONResponse  # of a package that a server alone needs

        return JSONResponse(self.body, self.status, self.headers)


def invalid(code: str, message: str, param: str | None = None) -> ApiError:
    """Error 400: the request is wrong."""
    return ApiError(400, code, message, param=param)


def http_code(code: str) -> str:
    """Return how a code of an ``SbkitError`` is spelt in an answer.

    >>> http_code("voice-not-found"), http_code("bad-value")
    ('voice_not_found', 'invalid_value')
    """
    return _OPENAI_CODES.get(code) or code.replace("-", "_")


@contextlib.contextmanager
def refused_for(param: str, code: str | None = None) -> Iterator[None]:
    """Turn a user error raised in this block into an error 400 of the field ``param``.

    code : that of the answer; None: that of the error
    """
    try:
        yield
    except SbkitError as error:
        raise invalid(code or http_code(error.code), str(error), param) from None


def too_large(limit: int, param: str | None = "file") -> ApiError:
    return ApiError(413, "upload_too_large", f"the upload is larger than {limit} bytes, the limit of this server",
                    param=param)


def busy(what: str, seconds: float) -> ApiError:
    wait = max(1, min(60, round(seconds)))
    return ApiError(429, "rate_limit_exceeded", f"{what}; try again in {wait} s", type=BUSY,
                    headers={"retry-after": str(wait)})


def unsupported(names: Sequence[str], known: Iterable[str]) -> ApiError:
    """Error 400: unknown fields.

    names : at least one
    known : those that may be given
    """
    message = f"this server does not support {', '.join(name[:40] for name in names[:8])}"
    near = difflib.get_close_matches(names[0], sorted(known), n=1)
    if near:
        message += f"; did you mean {near[0]}?"
    return invalid("unsupported_parameter", message, names[0][:40])


def not_ready(why: str = "the models are still being loaded") -> ApiError:
    """Error 503: the server is starting or stopping."""
    return ApiError(503, "not_ready", why, type=SERVER, headers={"retry-after": "2"})


def no_room(why: str, code: str = "no_room") -> ApiError:
    """Error 503: there is no room on the disk, or for another open file."""
    return ApiError(503, code, f"{why}; try again later", type=SERVER, headers={"retry-after": "5"})


def too_slow(how: str) -> ApiError:
    return ApiError(408, "upload_too_slow", f"the upload {how}", headers={"connection": "close"})


def stopping() -> ApiError:
    """Error 503: the server is stopping; ask another one."""
    error = not_ready("the server is stopping")
    error.headers["connection"] = "close"
    return error


def too_late(seconds: float) -> ApiError:
    """Error 504: the deadline passed. The client shouldn't try again: the same request would take as long again."""
    return ApiError(504, "deadline_exceeded",
                    f"not finished within {seconds:g} s, the limit of this server; send less at once",
                    type=SERVER, headers={"x-should-retry": "false"})


def failed(request: str, error: Exception | None = None) -> ApiError:
    """Error 500: a bug in the server; or 507: this request alone needs more memory than the device has."""
    if isinstance(error, OutOfMemory):
        return ApiError(507, http_code(error.code), str(error), type=SERVER, headers={"x-should-retry": "false"})
    return ApiError(500, "internal_error", f"the server failed; see {request} in its log", type=SERVER)

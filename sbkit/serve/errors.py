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


class ApiError(Exception):
    """An error that is sent to the client.

    status : HTTP status; the client retries 408, 409, 429 and 5xx
    message : in plain words, what is wrong and what to do
    param : the field that is wrong
    code : error code for programs
    headers : additional headers
    """

    def __init__(self, status: int, message: str, *, type: str = INVALID, param: str | None = None,
                 code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        from starlette.responses import JSONResponse  # of a package that a server alone needs

        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


@contextlib.contextmanager
def refused_for(param: str, code: str | None = None) -> Iterator[None]:
    """Turn a user error raised in this block into an error 400 of the field ``param``."""
    try:
        yield
    except SbkitError as error:
        raise invalid(str(error), param, code) from None


def too_large(limit: int, param: str | None = "file") -> ApiError:
    return ApiError(413, f"the upload is larger than {limit} bytes, the limit of this server", param=param,
                    code="upload_too_large")


def busy(what: str, seconds: float) -> ApiError:
    wait = max(1, min(60, round(seconds)))
    return ApiError(429, f"{what}; try again in {wait} s", type=BUSY, code="rate_limit_exceeded",
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
    return invalid(message, names[0][:40], "unsupported_parameter")


def not_ready(why: str = "the models are still being loaded") -> ApiError:
    """Error 503: the server is starting or stopping."""
    return ApiError(503, why, type=SERVER, code="not_ready", headers={"retry-after": "2"})


def no_room(why: str) -> ApiError:
    """Error 503: there is no room on the disk, or for another open file."""
    return ApiError(503, f"{why}; try again later", type=SERVER, code="no_room", headers={"retry-after": "5"})


def too_slow(how: str) -> ApiError:
    return ApiError(408, f"the upload {how}", code="upload_too_slow", headers={"connection": "close"})


def stopping() -> ApiError:
    """Error 503: the server is stopping; ask another one."""
    error = not_ready("the server is stopping")
    error.headers["connection"] = "close"
    return error


def too_late(seconds: float) -> ApiError:
    """Error 504: the deadline passed. The client shouldn't try again: the same request would take as long again."""
    return ApiError(504, f"not finished within {seconds:g} s, the limit of this server; send less at once",
                    type=SERVER, code="deadline_exceeded", headers={"x-should-retry": "false"})


def failed(request: str, error: Exception | None = None) -> ApiError:
    """Error 500: a bug in the server; or 507: this request alone needs more memory than the device has."""
    if isinstance(error, OutOfMemory):
        return ApiError(507, str(error), type=SERVER, code="out_of_memory", headers={"x-should-retry": "false"})
    return ApiError(500, f"the server failed; see {request} in its log", type=SERVER, code="internal_error")

"""Errors in OpenAI's shape, so that the official client raises what its users expect."""

from __future__ import annotations

from typing import Any

INVALID, SERVER, BUSY = "invalid_request_error", "server_error", "requests"


class ApiError(Exception):
    """What a client gets instead of an answer.

    Arguments
    ---------
    status : of HTTP; the client retries 408, 409, 429 and 5xx
    message : in plain words, what is wrong and what to do
    param : the field that is wrong
    code : for programs
    headers : to be sent along
    """

    def __init__(self, status: int, message: str, *, type: str = INVALID, param: str | None = None,
                 code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of it."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A field that can't be used."""
    return ApiError(400, message, param=param, code=code)


def too_large(limit: int) -> ApiError:
    """More bytes than one request may have."""
    return ApiError(413, f"the upload is larger than {limit} bytes, the limit of this server", param="file",
                    code="upload_too_large")


def busy(what: str, seconds: float) -> ApiError:
    """No room; come back later."""
    wait = max(1, min(60, round(seconds)))
    return ApiError(429, f"{what}; try again in {wait} s", type=BUSY, code="rate_limit_exceeded",
                    headers={"retry-after": str(wait)})


def unauthorized() -> ApiError:
    """No key, or a wrong one."""
    return ApiError(401, "the API key is missing or wrong; send it as: Authorization: Bearer KEY",
                    code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def unknown_model(name: str, known: list[str]) -> ApiError:
    """A name that the registry lacks."""
    return ApiError(404, f"the model {name[:80]!r} does not exist; there is {', '.join(known)}", param="model",
                    code="model_not_found")


def not_ready(why: str = "the models are still being loaded") -> ApiError:
    """At the beginning and at the end."""
    return ApiError(503, why, type=SERVER, code="not_ready",
                    headers={"retry-after": "2"})


def no_room(why: str) -> ApiError:
    """On the disk, or for another open file."""
    return ApiError(503, f"{why}; try again later", type=SERVER, code="no_room", headers={"retry-after": "5"})


def too_slow(how: str) -> ApiError:
    """An upload that would hold its place for ever."""
    return ApiError(408, f"the upload {how}", code="upload_too_slow", headers={"connection": "close"})


def stopping() -> ApiError:
    """Who asks now is to ask another server."""
    error = not_ready("the server is stopping")
    error.headers["connection"] = "close"
    return error


def wrong_host(host: str) -> ApiError:
    """A name that isn't this server's."""
    return ApiError(421, f"this server doesn't answer to the name {host[:80]!r}; start it with --allow-host NAME",
                    code="host_not_allowed")


def broken(fault: str) -> ApiError:
    """The device is gone, and stays so until the server is started again."""
    return ApiError(503, f"the device failed ({fault}); the server has to be started again", type=SERVER,
                    code="device_fault", headers={"x-should-retry": "false"})


def too_late(seconds: float) -> ApiError:
    """The deadline passed. The same audio would take as long again."""
    return ApiError(504, f"not done within {seconds:g} s, the limit of this server; send less audio at once",
                    type=SERVER, code="deadline_exceeded", headers={"x-should-retry": "false"})


def failed(request: str) -> ApiError:
    """A mistake of the server's own."""
    return ApiError(500, f"the server failed on this; its log names it {request}", type=SERVER, code="internal_error")

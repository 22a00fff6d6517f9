"""Explanations of errors from the Hugging Face hub: what is wrong and what to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TypeVar

E = TypeVar("E", bound=BaseException)
_LOG_IN = "`hf auth login`, or set HF_TOKEN"
_NETWORK = ("check the network (HTTPS_PROXY names a proxy, HF_ENDPOINT another hub) and start again: what is stored "
            "already is kept")
# HTTP clients of the versions of huggingface_hub.
_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp")


def explained(error: BaseException, dataset: str, revision: str | None = None) -> tuple[str, str]:
    """A message for an error while loading ``dataset``, and a hint what to do."""
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError
    from huggingface_hub import constants, errors

    causes = list(_causes(error))
    page = f"{constants.ENDPOINT}/datasets/{dataset}"

    def found(*kinds: type[E]) -> E | None:
        return next((cause for cause in causes if isinstance(cause, kinds)), None)

    if found(errors.RevisionNotFoundError):
        return f"it has no revision {revision!r}", f"its branches and commits are on {page}/commits/main"
    if found(errors.GatedRepoError, DatasetNotFoundError):  # `datasets` cuts off what caused it
        return reason(error), f"ask for access on {page} and log in: {_LOG_IN}"
    if found(errors.RepositoryNotFoundError):
        return "the hub has no such dataset, or it is private", f"check the name; for a private one log in: {_LOG_IN}"
    network = [cause for cause in causes if _is_network_error(cause)]
    if network and constants.HF_HUB_OFFLINE:
        return ("it is not in the cache, and HF_HUB_OFFLINE forbids to ask the hub",
                "unset HF_HUB_OFFLINE to download it")
    if found(DataFilesNotFoundError, EmptyDatasetError):
        return "it has no files that `datasets` can load", f"look at what it has: {page}/tree/main"
    answer = found(errors.HfHubHTTPError)
    if answer is not None and answer.response.status_code == 401:
        return "the hub refuses your token", f"log in anew: {_LOG_IN}"
    if answer is not None and answer.response.status_code == 403:
        return reason(answer), f"log in with an account that may read {page}: {_LOG_IN}"
    if answer is not None or network:
        return f"{reason(answer or network[-1])} ({constants.ENDPOINT})", _NETWORK
    return reason(error), f"look at its files: {page}/tree/main"


def reason(error: BaseException) -> str:
    """The informative line of an error: its first, but for the hub's answers the line after the HTTP status.

    For an error of `datasets` about a failed generation, it is that of its cause.
    """
    from datasets.exceptions import DatasetGenerationError

    while isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[1] if "Client Error" in lines[0] and len(lines) > 1 else lines[0]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_network_error(error: BaseException) -> bool:
    return (isinstance(error, (ConnectionError, TimeoutError, socket.gaierror))
            or type(error).__module__.partition(".")[0] in _CLIENTS)

"""The models of a server, by name: clients can only choose from this list, never by path."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from sbkit.errors import SbkitError, shown
from sbkit.export import layout
from sbkit.serve.errors import ApiError, invalid
from sbkit.serve.metrics import Metrics
from sbkit.serve.served import BundleOptions, FolderState, Served, folder_state
from sbkit.serve.served_kinds import SERVED, ServedRecogniser

_log = logging.getLogger(__name__)
#: Seconds until a bundle that was refused is tried again: there may be memory by then.
RETRY_SECONDS = 60.0
#: Names of models.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_bundles(arguments: Sequence[str]) -> dict[str, Path]:
    """Parse bundles by name, from ``BUNDLE`` (named after its folder) and ``NAME=BUNDLE``."""
    bundles: dict[str, Path] = {}
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not equals or Path(argument).is_dir():  # a folder's own name may have an equals sign
            name, path = Path(argument).resolve().name, argument
        if not _NAME.fullmatch(name):
            raise SbkitError("bad-value", f"{shown(name)} can't be the name of a model",
                             hint=f"give it one of letters, digits and -._ with NAME={path}", value=name)
        if name in bundles:
            raise SbkitError("bad-option", f"two bundles are named {name}",
                             hint=f"give them different names: NAME={path}", value=name)
        bundles[name] = Path(path)
    return bundles


S = TypeVar("S", bound=Served)


class _Refusal(NamedTuple):
    """A bundle that can't be served, and when it is tried again."""

    files: FolderState
    retry_at: float


class Registry:
    """All models of the server.

    options, metrics : as they were loaded with, for bundles that take their places
    """

    def __init__(self, served: Mapping[str, Served], options: BundleOptions, metrics: Metrics):
        self._served = dict(served)
        self._options = options
        self._metrics = metrics
        self._seen = {served.name: served.files for served in self}
        """The state of each folder at the last call of ``refresh``, by the model's name."""
        self._refusals: dict[str, _Refusal] = {}
        """The last bundle in each folder that can't be served."""

    def refresh(self) -> None:
        """Load bundles that replaced served ones, once their folders are the same at two calls.

        New requests get the new model. Requests in flight hold the old one, whose engines end when nobody holds it. A
        bundle that can't be served is refused, and the old one stays.
        """
        for name, served in list(self._served.items()):
            files = folder_state(served.folder)
            complete = files == self._seen[name]  # otherwise it may still be copied
            self._seen[name] = files
            if files == served.files:  # also when the old one was put back
                served.refused = None
                self._refusals.pop(name, None)
                continue
            refusal = self._refusals.get(name)
            is_refused = refusal is not None and files == refusal.files and time.monotonic() <= refusal.retry_at
            if complete and not is_refused:
                self._replace(name, served, files)

    def _replace(self, name: str, old: Served, files: FolderState) -> None:
        """Load the bundle that is now in the folder of ``old``, and serve it instead, or say why not."""
        try:
            config = layout.read(old.folder)
            kind = SERVED.of(config)
            if kind is not type(old):
                raise SbkitError("wrong-bundle-kind", f"it {kind.does}, but the model served here {old.does}",
                                 file=old.folder)
            layout.check_files(old.folder, config)  # takes about a second: a copy may be damaged
            new = kind(name, old.folder, self._options, self._metrics)
        except Exception as error:  # whatever a runtime raises for a broken graph, or without enough memory
            self._refusals[name] = _Refusal(files, time.monotonic() + RETRY_SECONDS)
            old.refused = f"{error} [{error.code}]" if isinstance(error, SbkitError) else str(error) or repr(error)
            _log.error("%s: the new bundle in %s can't be served, so the previous one stays in use: %s", name,
                       old.folder, old.refused)
            return
        self._served[name] = new
        _log.info("%s: serving the bundle that is now in %s: %s", name, old.folder, ", ".join(map(str, new.placements)))

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def of(self, kind: type[S]) -> list[S]:
        return [served for served in self if isinstance(served, kind)]

    def working(self, name: str | None, kind: type[S]) -> S:
        """The model that a request names; raises ``ApiError`` also if its device is broken."""
        if not name:
            names = ", ".join(served.name for served in self.of(kind)) or "none"
            raise invalid("missing_required_parameter", f"the field model is missing; this server has {names}", "model")
        served = self.find(name, kind)
        served.check()
        return served

    def find(self, name: str, kind: type[S]) -> S:
        """The model of this name; raises ``ApiError`` if there is none, or if it is of another kind."""
        served = self._served.get(name)
        if served is None:
            raise ApiError(404, "model_not_found", f"the model {name[:80]!r} does not exist; this server has "
                           f"{', '.join(self._served)}", param="model")
        if not isinstance(served, kind):
            raise invalid("model_not_supported", f"the model {name} {served.does}: use it at "
                          f"{' or '.join(served.endpoints)}", "model")
        return served

    def close(self) -> None:
        for served in self:
            served.close()


def load(bundles: Mapping[str, Path], options: BundleOptions, metrics: Metrics | None = None) -> Registry:
    """Load all bundles, or raise for the first broken one."""
    metrics = metrics or Metrics()
    kinds = {name: SERVED.of(layout.read(folder)) for name, folder in bundles.items()}
    recognises = any(issubclass(kind, ServedRecogniser) for kind in kinds.values())
    if not recognises and (options.search or options.chunk_seconds or options.batch_seconds or options.vad):
        raise SbkitError("wrong-bundle-kind", "language models, hot words, --vad, --chunk-seconds and --batch-seconds "
                         "are for recognisers, and none is served", hint="leave them out, or serve a recogniser too")
    loaded: dict[str, Served] = {}
    try:
        for name, folder in bundles.items():
            loaded[name] = kinds[name](name, folder, options, metrics)
    except BaseException:
        for served in loaded.values():
            served.close()
        raise
    return Registry(loaded, options, metrics)

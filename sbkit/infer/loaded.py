"""Base of loaded bundles: an engine, where it runs, and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from sbkit.infer.bundle_engine import BundleEngine
from sbkit.infer.device import Placement

if TYPE_CHECKING:
    from typing_extensions import Self

E = TypeVar("E", bound=BundleEngine)


class Loaded(Generic[E]):
    """A loaded bundle, which any number of threads may call.

    Arguments
    ---------
    engine : runs it
    """

    def __init__(self, engine: E):
        self.engine = engine

    @property
    def running(self) -> Placement:
        """The requested device, and the one the model runs on."""
        return self.engine.running

    def close(self) -> None:
        """Release the model."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

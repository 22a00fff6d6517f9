"""A codec of speech as a task."""

from __future__ import annotations

from sbkit.tasks.codec.task import Codec

__all__ = ["Codec"]

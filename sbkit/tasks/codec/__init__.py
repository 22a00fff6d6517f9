"""A codec of speech as a task."""

from sbkit.tasks.codec.task import Codec

__all__ = ["Codec"]

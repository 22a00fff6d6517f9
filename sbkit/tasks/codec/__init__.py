"""A codec of speech as a task."""

from typing import TYPE_CHECKING

from sbkit.system.lazy import on_first_use
from sbkit.tasks.codec.keys import CodecKeys as Keys

if TYPE_CHECKING:
    from sbkit.tasks.codec.task import Codec

__all__ = ["Codec", "Keys"]

__getattr__ = on_first_use("sbkit.tasks.codec.task", "Codec")

"""Speech recognition with a transducer (RNN-T), alone or with CTC."""

from typing import TYPE_CHECKING

from sbkit.system.lazy import on_first_use
from sbkit.tasks.transducer.keys import TransducerKeys as Keys

if TYPE_CHECKING:
    from sbkit.tasks.transducer.task import Transducer

__all__ = ["Keys", "Transducer"]

__getattr__ = on_first_use("sbkit.tasks.transducer.task", "Transducer")

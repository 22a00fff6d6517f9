"""Speech recognition with a transducer (RNN-T), alone or with CTC."""

from sbkit.tasks.transducer.task import Transducer

__all__ = ["Transducer"]

"""Speech recognition with CTC, alone or together with an attention decoder: all that this task knows."""

from sbkit.tasks.ctc.task import CTC, Scores

__all__ = ["CTC", "Scores"]

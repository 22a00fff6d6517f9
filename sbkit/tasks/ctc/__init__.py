"""The task of speech recognition with CTC, alone or with an attention decoder."""

from sbkit.tasks.ctc.task import CTC, Scores

__all__ = ["CTC", "Scores"]

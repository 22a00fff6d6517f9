"""The task of speech recognition with CTC, alone or with an attention decoder."""

from typing import TYPE_CHECKING

from sbkit.system.lazy import on_first_use
from sbkit.tasks.ctc.keys import CTCKeys as Keys

if TYPE_CHECKING:
    from sbkit.tasks.ctc.task import CTC, Scores

__all__ = ["CTC", "Keys", "Scores"]

__getattr__ = on_first_use("sbkit.tasks.ctc.task", "CTC", "Scores")

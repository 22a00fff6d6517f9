"""Speaker verification as a task."""

from typing import TYPE_CHECKING

from sbkit.system.lazy import on_first_use
from sbkit.tasks.speaker.keys import SpeakerKeys as Keys

if TYPE_CHECKING:
    from sbkit.tasks.speaker.task import Verification

__all__ = ["Keys", "Verification"]

__getattr__ = on_first_use("sbkit.tasks.speaker.task", "Verification")

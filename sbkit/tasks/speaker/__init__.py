"""Speaker verification as a task."""

from sbkit.tasks.speaker.task import Verification

__all__ = ["Verification"]

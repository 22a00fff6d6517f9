"""Speaker verification as a task."""

from __future__ import annotations

from sbkit.tasks.speaker.task import Speaker

__all__ = ["Speaker"]

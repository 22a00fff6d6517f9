"""Speaker verification as a task."""

from __future__ import annotations

from sbkit.tasks.speaker.task import Verification

__all__ = ["Verification"]

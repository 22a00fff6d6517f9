"""Speech enhancement as a task."""

from __future__ import annotations

from sbkit.tasks.enhance.task import Enhancement

__all__ = ["Enhancement"]

"""Speech enhancement as a task."""

from sbkit.tasks.enhance.task import Enhancement

__all__ = ["Enhancement"]

"""Speech enhancement as a task."""

from typing import TYPE_CHECKING

from sbkit.system.lazy import on_first_use
from sbkit.tasks.enhance.keys import EnhancementKeys as Keys

if TYPE_CHECKING:
    from sbkit.tasks.enhance.task import Enhancement

__all__ = ["Enhancement", "Keys"]

__getattr__ = on_first_use("sbkit.tasks.enhance.task", "Enhancement")

"""report.html: a run's training, its errors, and what to fix next, on one page."""

from sbkit.score.report.page import write_report

__all__ = ["write_report"]

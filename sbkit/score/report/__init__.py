"""report.html: what a run does, what it gets wrong, and what to fix next, as one page."""

from sbkit.score.report.page import write_report

__all__ = ["write_report"]

"""Lines of a stream: words up to a pause, and those of the line in progress."""

from __future__ import annotations

from dataclasses import dataclass

from sbkit.decode.heard import Heard
from sbkit.decode.spans import Word

#: A line in which nobody pauses ends after this long, so that what is kept of a stream is bounded.
LONGEST_SECONDS = 60.0


@dataclass(frozen=True)
class Line:
    """A line as it stands now."""

    settled: list[Word]
    """Words that stay."""
    partial: list[Word]
    """Words after them that may change."""
    over: bool
    """Whether it is complete; then there is another one after it."""

    @property
    def words(self) -> list[Word]:
        """All of its words."""
        return self.settled + self.partial


class Lines:
    """Gathers what is heard of a stream into lines."""

    def __init__(self) -> None:
        self._settled: list[Word] = []

    def add(self, heard: Heard) -> list[Line]:
        """Return the lines that changed: the one that ends here, if one does, and the one in progress."""
        self._settled += heard.settled
        changed = []
        if self._settled and (heard.endpoint or self._settled[-1].end - self._settled[0].start >= LONGEST_SECONDS):
            changed.append(Line(self._settled, [], True))
            self._settled = []
        if heard.partial or not changed:
            changed.append(Line(list(self._settled), heard.partial, False))
        return changed

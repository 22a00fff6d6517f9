"""Counters, gauges and histograms in Prometheus's text format."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

Labels = tuple[tuple[str, str], ...]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class _Metric(ABC):
    kind = ""

    def __init__(self, name: str, what: str):
        self.name, self.what = name, what
        self._lock = threading.Lock()

    def lines(self) -> list[str]:
        """Format as text."""
        return [f"# HELP {self.name} {self.what}", f"# TYPE {self.name} {self.kind}", *self._values()]

    @abstractmethod
    def _values(self) -> list[str]:
        """Format the values, without the header."""


class Counter(_Metric):
    """A value that only grows."""

    kind = "counter"

    def __init__(self, name: str, what: str):
        super().__init__(name, what)
        self._counts: dict[Labels, float] = {}

    def add(self, amount: float = 1.0, **labels: str) -> None:
        """Count."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._counts[key] = self._counts.get(key, 0.0) + amount

    def _values(self) -> list[str]:
        with self._lock:
            counts = self._counts or {(): 0.0}
            return [f"{self.name}{_labels(key)} {value:.15g}" for key, value in sorted(counts.items())]


class Gauge(_Metric):
    """Current values of a function, by labels."""

    kind = "gauge"

    def __init__(self, name: str, what: str, read: Callable[[], Mapping[Labels, float]]):
        super().__init__(name, what)
        self._read = read

    def _values(self) -> list[str]:
        return [f"{self.name}{_labels(key)} {value:.15g}" for key, value in sorted(self._read().items())]


class Histogram(_Metric):
    """Counts of values by upper bound."""

    kind = "histogram"

    def __init__(self, name: str, what: str, bounds: Sequence[float]):
        super().__init__(name, what)
        self._bounds = list(bounds)
        self._found: dict[Labels, tuple[list[int], float]] = {}

    def observe(self, value: float, **labels: str) -> None:
        """Add a value."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            counts, total = self._found.get(key, ([0] * (len(self._bounds) + 1), 0.0))
            counts[bisect_left(self._bounds, value)] += 1
            self._found[key] = counts, total + value

    def _values(self) -> list[str]:
        lines = []
        with self._lock:
            for key, (counts, total) in sorted(self._found.items()):
                below = 0
                for bound, count in zip([*map("{:g}".format, self._bounds), "+Inf"], counts, strict=True):
                    below += count
                    lines.append(f"{self.name}_bucket{_labels((*key, ('le', bound)))} {below}")
                lines += [f"{self.name}_sum{_labels(key)} {total:.15g}", f"{self.name}_count{_labels(key)} {below}"]
        return lines


def _labels(pairs: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Metrics:
    """All metrics of the server."""

    def __init__(self) -> None:
        self.requests = Counter("sbkit_requests_total", "Requests answered, by path and status.")
        self.seconds = Histogram("sbkit_request_seconds", "From a request's first byte to its answer's last.", SECONDS)
        self.audio = Counter("sbkit_audio_seconds_total", "Audio transcribed, in seconds.")
        self.spoken = Counter("sbkit_spoken_seconds_total", "Audio spoken, in seconds.")
        self.first_audio = Histogram("sbkit_first_audio_seconds", "From a valid text to its first audio.", SECONDS)
        self.batches = Histogram("sbkit_batch_rows", "Signals, or a voice's sentences, in a batch.", ROWS)
        self.steps = Histogram("sbkit_step_rows", "Live sessions in a step of the graph for streams.", ROWS)
        self.refused = Counter("sbkit_refused_total", "Requests refused, by reason.")
        self.cancelled = Counter("sbkit_cancelled_total", "Requests whose client left or whose deadline passed.")
        self.cut = Counter("sbkit_cut_total", "Speech that broke off after its first byte, by reason.")
        self.decoders = Counter("sbkit_decoder_restarts_total", "Decoding processes that were replaced.")
        self.gauges: list[Gauge] = []

    def text(self) -> str:
        """Format all metrics for /metrics."""
        every = [self.requests, self.seconds, self.audio, self.spoken, self.first_audio, self.batches, self.steps,
                 self.refused, self.cancelled, self.cut, self.decoders, *self.gauges]
        return "\n".join(line for each in every for line in each.lines()) + "\n"

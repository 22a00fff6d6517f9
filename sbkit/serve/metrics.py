"""Metrics of the server, for Prometheus to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

disable_created_metrics()


class Metrics:
    """All metrics of the server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests_total", "Requests answered, by path and status.", "path", "status")
        self.seconds = self._histogram("request_seconds", "From a request's first byte to its answer's last.", SECONDS,
                                       "path")
        self.audio = self._counter("audio_seconds_total", "Audio transcribed, in seconds.", "model")
        self.spoken = self._counter("spoken_seconds_total", "Audio synthesised, in seconds.", "model")
        self.first_audio = self._histogram("first_audio_seconds", "From a valid text to its first audio.", SECONDS,
                                           "model")
        self.batches = self._histogram("batch_rows", "Signals, or a voice's sentences, in a batch.", ROWS, "model")
        self.steps = self._histogram("step_rows", "Live sessions in a step of the streaming graph.", ROWS, "model")
        self.refused = self._counter("refused_total", "Requests refused, by reason.", "reason")
        self.cancelled = self._counter("cancelled_total", "Requests whose client left or whose deadline passed.",
                                       "reason")
        self.cut = self._counter("cut_total", "Speech responses cut off after their first byte, by reason.", "reason")
        self.decoders = self._counter("decoder_restarts_total", "Decoding processes that were replaced.")

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"sbkit_{name}", help_text, labels, registry=self._registry)

    def _histogram(self, name: str, help_text: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"sbkit_{name}", help_text, labels, buckets=bounds, registry=self._registry)

    def gauge(self, name: str, help_text: str, labels: Iterable[str],
              read: Callable[[], Iterable[tuple[Iterable[str], float]]]) -> None:
        """Add a gauge whose values, each with those of its labels, are read at each scrape."""
        self._registry.register(_Gauge(name, help_text, list(labels), read))

    def text(self) -> str:
        return generate_latest(self._registry).decode()


class _Gauge(Collector):
    def __init__(self, name: str, help_text: str, labels: list[str],
                 read: Callable[[], Iterable[tuple[Iterable[str], float]]]):
        self._family, self._read = (f"sbkit_{name}", help_text, None, labels), read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(*self._family)
        for labels, value in self._read():
            family.add_metric(list(labels), value)
        yield family

"""Bundles whose model outputs tensors: from recordings to named arrays and the best label."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sbkit.data.audio import AudioError
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.batches import batch_seconds, plan_batches
from sbkit.infer.bundle_engine import LoadedBundle
from sbkit.infer.device import OutOfMemory
from sbkit.infer.engine import Engine
from sbkit.infer.formats import AUTO
from sbkit.infer.recordings import Recording, Source
from sbkit.infer.sound_file import write_sound

if TYPE_CHECKING:
    from typing_extensions import Self

#: Longest recording in seconds: these models take whole recordings.
MAX_SECONDS = 600.0
#: Longest recording in seconds that a model is compiled for by default.
USUAL_SECONDS = 20.0
_DIGITS = 7  # of a float32
_BATCHES_WAITING = 4  # batches to choose similar lengths from


@dataclass
class Output:
    """A model's output for one recording."""

    outputs: dict[str, np.ndarray]
    """The arrays by name, without padding."""
    results: Mapping[str, Any] = field(default_factory=dict)
    """What else the bundle's configuration says of them: ``label`` or ``labels``, or what a kind of yours does."""
    lengths: Mapping[str, str] = field(default_factory=dict)
    """For each output of variable length, the output that has its lengths."""

    @property
    def label(self) -> str | None:
        """The label of the largest value of the first output, if the bundle has labels."""
        return self.results.get("label")

    @property
    def labels(self) -> dict[str, float] | None:
        """The labels of a recording that can have several, with their scores, the highest first."""
        return self.results.get("labels")

    @property
    def size(self) -> int:
        return sum(array.size for array in self.outputs.values())

    def facts(self) -> dict[str, Any]:
        """The results and all outputs, for JSON."""
        return {name: _rounded(value) for name, value in [*self.results.items(), *self.outputs.items()]}

    def wav(self, rate: int, samples: float) -> bytes:
        """The first output as a WAV file, if it is as long as the recording's ``samples``, within 10 %."""
        name, signal = next(iter(self.outputs.items()))
        is_waveform = signal.ndim == 1 and np.issubdtype(signal.dtype, np.floating) and name in self.lengths
        if not is_waveform or abs(len(signal) - samples) > 1 + 0.1 * samples:
            raise SbkitError("not-a-waveform", f"the output {name} {list(signal.shape)} is not a waveform",
                             hint="choose another format: json or npz")
        file = io.BytesIO()
        write_sound(file, "wav", rate, signal)
        return file.getvalue()


def _rounded(value: Any) -> Any:  # of JSON, or an array
    """Turn arrays into lists, and round numbers to float32's precision."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim):
        return [_rounded(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.item()
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


class GraphEngine(Engine):
    """Computes named arrays from waveforms."""

    config: layout.GraphConfig  # type: ignore[assignment]  # another kind of bundle

    def output(self, outputs: dict[str, np.ndarray]) -> Output:
        """Add what the bundle's configuration says of them."""
        return Output(outputs, self.config.results(outputs), self.config.lengths)

    def _read(self) -> None:
        self.config = layout.GraphConfig.read(self.folder)

    def _usual_seconds(self) -> float:
        return USUAL_SECONDS

    def _split(self, outputs: Sequence[np.ndarray], count: int) -> list[Any]:
        first = outputs[0]
        labels = self.config.labels
        if labels and first.ndim > 1 and first.shape[-1] != len(labels):
            raise SbkitError("mismatched-bundle", f"{self.folder}: the model outputs {first.shape[-1]} values, but "
                             f"{layout.CONFIG} has {len(labels)} labels", hint="do both come from the same export?",
                             file=self.folder)
        batch = dict(zip(self.config.outputs, outputs, strict=True))
        rows = []
        for row in range(count):
            arrays = {name: array[row] for name, array in batch.items()}
            for name, name_of_lengths in self.config.lengths.items():
                length = int(batch[name_of_lengths][row])
                arrays[name] = arrays[name][:length]  # without padding
            rows.append(arrays)
        return rows


class GraphModel(LoadedBundle[GraphEngine]):
    """A loaded model, which any number of threads may call."""

    @classmethod
    def open(cls, bundle: str | Path, model: str = AUTO, device: str = AUTO, threads: int | None = None,
             compile: str | None = None, buckets: Sequence[tuple[int, float]] | None = None) -> Self:
        return cls(GraphEngine(bundle, model, device, threads, compile, buckets))

    def run(self, audio: Source | list[Source]) -> Output | list[Output]:
        """Run the model on a recording of any format, or on a list of them, with results in the same order.

        audio : a path, the bytes of a file, a binary file, or float samples [S] at the model's rate
        """
        recordings = [Recording.of(source) for source in (audio if isinstance(audio, list) else [audio])]
        outputs: list[Output] = []
        for result in self.run_each(recordings):
            if isinstance(result, AudioError):
                raise result
            outputs.append(result)
        return outputs if isinstance(audio, list) else outputs[0]

    def run_each(self, recordings: Iterable[Recording]) -> Generator[Output | AudioError, None, None]:
        """Yield the output of each recording, or the error of one that can't be read, in the same order.

        Some are read at a time and run in batches of similar lengths, so memory doesn't grow with their number.
        """
        config = self.engine.config
        limit = batch_seconds(self.engine.running.device) * config.sample_rate
        waiting: list[np.ndarray | AudioError] = []
        samples = 0
        for recording in recordings:
            try:
                signal = self._signal(recording)
            except AudioError as error:
                waiting.append(error)
                continue
            except SbkitError:
                yield from self._run_batches(waiting, limit)
                raise
            waiting.append(signal)
            samples += len(signal)
            if samples >= _BATCHES_WAITING * limit:
                yield from self._run_batches(waiting, limit)
                waiting = []
                samples = 0
        yield from self._run_batches(waiting, limit)

    def _signal(self, recording: Recording) -> np.ndarray:
        rate = self.engine.config.sample_rate
        seconds = recording.seconds(rate)
        if seconds > MAX_SECONDS:
            raise SbkitError("audio-too-long", f"{recording.name} is {seconds:.0f} s long, but this model takes whole "
                             f"recordings of up to {MAX_SECONDS:g} s", hint="split it into shorter recordings")
        return recording.samples(rate)

    def _run_batches(self, signals: Sequence[np.ndarray | AudioError], limit: float) -> Iterator[Output | AudioError]:
        """Run signals, and yield their outputs in the same order; errors stay in their places."""
        results: list[Output | AudioError | None] = [None] * len(signals)
        readable: list[tuple[int, np.ndarray]] = []
        for index, signal in enumerate(signals):
            if isinstance(signal, AudioError):
                results[index] = signal
            else:
                readable.append((index, signal))
        plan = plan_batches([len(signal) for _, signal in readable], limit, self.engine.config.batching)
        for batch in plan:
            arrays_of_batch = self._run_batch([readable[number][1] for number in batch])
            for number, arrays in zip(batch, arrays_of_batch, strict=True):
                results[readable[number][0]] = self.engine.output(arrays)
        for result in results:
            assert result is not None, "each signal is in a batch"
            yield result

    def _run_batch(self, signals: Sequence[np.ndarray]) -> list[dict[str, np.ndarray]]:
        try:
            return self.engine.run(signals)
        except OutOfMemory:
            if len(signals) == 1:
                raise
        return [self.engine.run([signal])[0] for signal in signals]

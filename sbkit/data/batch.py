"""A micro-batch of padded signals and tokens with its place in the epoch, and its copy to the device."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from speechbrain.dataio.batch import PaddedData

SAMPLE_RATE = 16_000
#: By what int16 samples are divided, as libsndfile does.
FULL_SCALE = 2**15
#: The id of rows of a dummy batch, and of rows that fill a shape.
DUMMY_ID = "<stand-in>"


class PlannedBatch:
    """Base of the batches of a plan, which say what training has to know of them besides their data.

    Training reads these names of such batches only. In any other batch they are keys of the recipe, which may mean
    anything: it has weight 1, and ends its step by ``grad_accumulation_factor``.
    """

    micro: int = 0
    micros: int = 1
    weight: float = 1.0
    beyond_shape: bool = False
    damaged: Sequence[tuple[str, str]] = ()
    #: Fields whose lists don't have one entry for each row.
    not_by_row: ClassVar[frozenset[str]] = frozenset(("damaged", "goes_on"))

    @property
    def seconds(self) -> float:
        """Seconds of audio without padding; 0 if they are unknown."""
        return 0.0

    @property
    def padded_seconds(self) -> float:
        """Seconds of audio with padding; 0 if they are unknown."""
        return 0.0

    @property
    def is_dummy(self) -> bool:
        """Whether it holds no data: a rank that has none for a step computes it, to take part in the step."""
        return self.weight == 0

    @property
    def last(self) -> bool:
        """Whether the optimizer steps after this micro-batch."""
        return self.micro == self.micros - 1


_NOT_PLANNED = PlannedBatch()


def as_planned(batch: object) -> PlannedBatch:
    """Return what training has to know of a batch: the batch itself, or defaults if it is not of a plan."""
    return batch if isinstance(batch, PlannedBatch) else _NOT_PLANNED


@dataclass
class Batch(PlannedBatch):
    """Micro-batch ``micro`` of ``micros`` of optimizer step ``step``, as one rank sees it."""

    ids: list[str]
    signals: Tensor
    """``[B, S]`` float32, zero-padded waveforms; int16 on the way to a GPU, if all are stored so."""
    signal_lengths: Tensor
    """``[B]`` int64, in samples."""
    tokens: Tensor
    """``[B, U]`` int64, 0-padded; ``[B, 0]`` if the task has no encoder."""
    token_lengths: Tensor
    """``[B]`` int64."""
    texts: list[str]
    columns: dict[str, Any] = field(default_factory=dict)  # what each kind of column makes
    """The columns that the task declares, by name: B texts, ``Padded`` signals, or what a kind of the user's makes."""
    labels: dict[str, Tensor] = field(default_factory=dict)
    """``[B]`` int64, the numbers of texts of ``columns`` in a list of the recipe."""
    step: int = 0
    micro: int = 0
    micros: int = 1
    weight: float = 1.0
    """0.0 for a dummy batch, which a rank without data for this step computes to take part in it; 1.0 for any batch
    that is padded to a shape."""
    real: Tensor = None  # type: ignore[assignment]  # set below
    """``[B]`` bool, True for utterances, False for rows that fill a shape or are those of a dummy batch: a loss must
    count none of these."""
    damaged: list[tuple[str, str]] = field(default_factory=list)
    """(id, reason) of every utterance that belongs here and could not be read."""
    goes_on: list[tuple[str, str]] = field(default_factory=list)
    """(id, what is wrong) of every utterance whose recording goes on after what its row says."""
    samples: int = 0
    """Sum of ``signal_lengths``, known on the CPU; 0 for a dummy batch."""
    sample_rate: int = SAMPLE_RATE
    beyond_shape: bool = False
    """Whether it is larger than the shape of its step, because a recording is longer than its row says."""

    def __post_init__(self) -> None:
        if self.real is None:
            self.real = self.signals.new_full((len(self.ids),), not self.is_dummy, dtype=torch.bool)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the fields of a pickled batch; one that an earlier version saved for ``sbkit rerun`` lacks the newest.
        """
        for declared in dataclasses.fields(self):
            if declared.default_factory is not dataclasses.MISSING:  # other defaults are attributes of the class
                setattr(self, declared.name, declared.default_factory())
        vars(self).update(state)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.ids)

    @property
    def seconds(self) -> float:
        """Seconds of audio without padding."""
        return self.samples / self.sample_rate

    @property
    def padded_seconds(self) -> float:
        """Seconds of audio with padding: the number of rows times the longest."""
        return self.signals.shape[0] * self.signals.shape[1] / self.sample_rate

    @property
    def sig(self) -> PaddedData:
        """(signals, relative lengths) as SpeechBrain's ``PaddedData``."""
        from speechbrain.dataio.batch import PaddedData  # imports most of SpeechBrain

        return PaddedData(self.signals, self.signal_lengths / max(self.signals.shape[1], 1))

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """A copy with its tensors on ``device``, where samples of 16 bits become numbers from -1 to 1."""
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if moved.signals.dtype == torch.int16:
            moved.signals = moved.signals / FULL_SCALE
        return moved

    def repeated(self, times: int) -> Batch:
        """A batch with all rows repeated ``times`` times, for a model that sees several views of each utterance."""
        longer = copy.copy(self)
        for name, value in vars(self).items():
            if name not in self.not_by_row:
                setattr(longer, name, _repeated(value, times))
        return longer

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which a GPU can copy while it computes."""
        return self._map(Tensor.pin_memory)

    def tensors(self) -> list[Tensor]:
        """All tensors of the batch, in whichever fields they are."""
        return list(_tensors_in(vars(self)))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """A copy with all tensors changed, in whichever fields they are."""
        mapped = copy.copy(self)
        for name, value in vars(self).items():
            setattr(mapped, name, _mapped(value, change))
        return mapped


# A field may hold tensors within dicts, named tuples and tuples, and in lists with one entry for each row.


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors_in(inner)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:  # of the same type as the value
    """A copy of a field with all its tensors changed; lists without tensors stay the same objects."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(inner, change) for name, inner in value.items()}
    if isinstance(value, (list, tuple)) and any(True for _ in _tensors_in(value)):
        return _like(value, [_mapped(inner, change) for inner in value])
    return value


def _repeated(value: Any, times: int) -> Any:  # of the same type as the value
    """A field with all rows repeated."""
    if isinstance(value, Tensor):
        return value.repeat(times, *[1] * (value.dim() - 1))
    if isinstance(value, dict):
        return {name: _repeated(inner, times) for name, inner in value.items()}
    if isinstance(value, list):
        return value * times
    if isinstance(value, tuple):
        return _like(value, [_repeated(inner, times) for inner in value])
    return value  # numbers


def _like(value: Any, items: list[Any]) -> Any:  # of the same type as the value
    """A list, tuple or named tuple like another, with other items."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def dummy_batch(*, utterances: int = 1, tokens: bool = True, sample_rate: int = SAMPLE_RATE, **place: Any) -> Batch:
    """A batch of weight 0: a second of faint noise and a token in each row, so that every loss stays finite."""
    signals = 1e-3 * torch.randn(utterances, sample_rate, generator=torch.Generator().manual_seed(0))
    return Batch(
        ids=[DUMMY_ID] * utterances, signals=signals, signal_lengths=torch.full((utterances,), sample_rate),
        tokens=torch.ones(utterances, int(tokens), dtype=torch.long),
        token_lengths=torch.full((utterances,), int(tokens)), texts=[""] * utterances, weight=0.0, samples=0,
        sample_rate=sample_rate, **place,
    )


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for all copies to a device: the allocator doesn't reuse the memory of one stream for another."""
    return torch.cuda.Stream(device)


class DevicePrefetcher:
    """Iterates over batches on ``device``, and copies the next one while the current one is computed.

    On CUDA the copies run on a separate stream and overlap with computation if the memory is pinned; on any other
    device each batch is copied when it is needed.
    """

    def __init__(self, batches: Iterable[Batch], device: torch.device | str):
        self.batches = batches
        self.device = torch.device(device)

    def __iter__(self) -> Iterator[Batch]:
        if self.device.type != "cuda":
            for batch in self.batches:
                yield batch.to(self.device)
            return
        stream = _copy_stream(self.device)
        current = None
        for batch in self.batches:
            with torch.cuda.stream(stream):
                upcoming = batch.to(self.device)
                ready = stream.record_event()
            if current is not None:
                yield self._hand_over(*current)
            current = upcoming, ready
        if current is not None:
            yield self._hand_over(*current)

    def _hand_over(self, batch: Batch, ready: torch.cuda.Event) -> Batch:
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(ready)
        for tensor in batch.tensors():
            tensor.record_stream(compute)  # the allocator must not reuse it for a copy while compute reads it
        return batch

"""The log-mel filter banks of Kaldi, and of NeMo, as a layer for batches of waveforms on any device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.lengths import N
from sbkit.nn.tf32 import without_tf32

_FLOOR = 1.1920928955078125e-07  # smallest energy that Kaldi takes the logarithm of
_POVEY = 0.85  # Povey's window is Hann's to this power
# Slaney's mel scale: Hertz per mel below 1 kHz, which is _BEND; above it, the logarithm of a mel's factor.
_LINEAR, _BEND, _FACTOR = 200.0 / 3.0, 15.0, math.log(6.4) / 27.0


class FilterBank(nn.Module):
    """Waveforms [B, S] to features [B, T, F], equal to those of ``compute-fbank-feats`` without dither.

    :meth:`frames` counts the frames of a waveform. It computes in fp32 even under autocast, and has no state in
    checkpoints.

    sample_rate : of the waveforms
    n_mels : number of bands
    frame_length, frame_shift : milliseconds
    low, high : limits of the bands in Hertz; 0 or a negative ``high`` is relative to half the sample rate
    preemphasis : share of the previous sample that is subtracted
    scale : factor for the samples; 32768 for models trained on Kaldi's features of 16-bit samples
    snip_edges : frames are entirely within the waveform; otherwise there is one centred in each ``frame_shift``, and
        the waveform is mirrored at its own beginning and end
    remove_dc : subtract each frame's mean
    window : ``povey``, Kaldi's own, or ``hann``, periodic as in librosa and NeMo
    mel : the filters: ``kaldi``, evenly spaced on the mel scale, or ``slaney``, of equal area as in librosa and NeMo

    >>> FilterBank()(torch.randn(2, 16_000)).shape
    torch.Size([2, 98, 80])
    """

    window: Tensor
    fourier: Tensor
    mel: Tensor

    def __init__(self, sample_rate: int = 16_000, n_mels: int = 80, frame_length: float = 25.0,
                 frame_shift: float = 10.0, low: float = 20.0, high: float = 0.0, preemphasis: float = 0.97,
                 scale: float = 1.0, snip_edges: bool = True, remove_dc: bool = True, window: str = "povey",
                 mel: str = "kaldi"):
        super().__init__()
        for name, value, options in (("window", window, _WINDOWS), ("mel", mel, _FILTERS)):
            if value not in options:
                raise ValueError(f"{name} is {value!r}, but must be {' or '.join(options)}")
        top = high if high > 0 else sample_rate / 2 + high
        if not 0 <= low < top <= sample_rate / 2:
            raise ValueError(f"the bands go from {low:g} to {top:g} Hz, but must lie between 0 and half the sample "
                             f"rate, {sample_rate / 2:g} Hz")
        self.sample_rate = sample_rate
        self.snip_edges = snip_edges
        self.remove_dc = remove_dc
        self.preemphasis = preemphasis
        self.scale = scale
        self.settings = {"sample_rate": sample_rate, "n_mels": n_mels, "frame_length": frame_length,
                         "frame_shift": frame_shift, "low": low, "high": high, "preemphasis": preemphasis,
                         "scale": scale, "snip_edges": snip_edges, "remove_dc": remove_dc, "window": window, "mel": mel}
        """All arguments."""
        self.size = round(sample_rate * frame_length / 1000)
        self.hop = round(sample_rate * frame_shift / 1000)
        self.bins = 1 << (self.size - 1).bit_length()
        self.first = 0 if snip_edges else self.hop // 2 - self.size // 2
        """The sample at which the first frame begins; negative: in the mirrored samples."""
        self.register_buffer("window", _WINDOWS[window](self.size).float(), persistent=False)
        self.register_buffer("fourier", fourier(self.size, self.bins), persistent=False)
        self.register_buffer("mel", _FILTERS[mel](sample_rate, self.bins, n_mels, low, top), persistent=False)

    def frames(self, samples: N) -> N:
        """Return the number of frames for a number of samples; with ``snip_edges``, at least ``size`` of them."""
        return (samples - self.size) // self.hop + 1 if self.snip_edges else (samples + self.hop // 2) // self.hop

    def forward(self, signals: Tensor, lengths: Tensor | None = None, *, count: int | None = None) -> Tensor:
        """Waveforms [B, S], and the samples of each [B] (None: all S), to [B, T, F]; frames beyond a waveform's own are
        undefined.

        count : return only this many frames
        """
        if not self.snip_edges:
            samples = signals.shape[1]
            count = self.frames(samples) if count is None else count
            if lengths is None:
                lengths = torch.full_like(signals[:, 0], samples, dtype=torch.int64)
            signals = mirrored(signals, lengths, -self.first, self.size - self.size // 2)
        return self.from_frames(framed(signals, self.size, self.hop, count))

    def from_frames(self, frames: Tensor) -> Tensor:
        """Compute the features [B, T, F] of frames of a waveform [B, T, size]."""
        with full_precision(frames):
            frames = frames.float()
            # Both windows begin with 0, so the first sample only matters for the second one's preemphasis.
            waves = torch.sub(frames[..., 1:], frames[..., :-1], alpha=self.preemphasis)
            if self.remove_dc:
                waves = waves - (1 - self.preemphasis) * frames.mean(2, keepdim=True)
            power = spectrum(waves * (self.window[1:] * self.scale), self.fourier[1:], self.bins)
            return product(power, self.mel).clamp(min=_FLOOR).log()


def full_precision(signals: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context without autocast, since spectral power exceeds the range of half precision, and without TF32."""
    kind = signals.device.type
    without_autocast = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) \
        else contextlib.nullcontext()
    return without_autocast if torch.compiler.is_compiling() else _and_without_tf32(without_autocast)


@contextlib.contextmanager
def _and_without_tf32(outer: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    with outer, without_tf32():
        yield


def mirrored(signals: Tensor, lengths: Tensor, before: int, after: int) -> Tensor:
    """Pad waveforms [B, S] of lengths [B] by mirroring them at both ends: [B, before + S + after].

    Where the mirrored samples end too, they are mirrored again. A negative ``before`` removes samples.
    """
    ends = lengths[:, None].clamp(min=1)

    def mirror(places: Tensor) -> Tensor:
        """Return the samples [B, N] at places 0 .. 2 ends - 1, of which the second half is mirrored into the first."""
        return signals.gather(1, torch.minimum(places, 2 * ends - 1 - places))

    offsets = torch.arange(after, device=signals.device)
    places_in_front = torch.arange(min(0, -before), 0, device=signals.device).remainder(2 * ends)
    places_behind = (ends + offsets).remainder(2 * ends)
    in_front = mirror(places_in_front)
    behind = mirror(places_behind)
    whole = torch.cat([in_front, signals[:, max(0, -before):], signals.new_zeros(signals.shape[0], after)], dim=1)
    return whole.scatter_(1, (ends + before).clamp(min=0) + offsets, behind)


def framed(signals: Tensor, size: int, hop: int, count: int | None = None) -> Tensor:
    """Cut waveforms [B, S] into frames [B, T, size] that start every ``hop`` samples; all, or ``count``."""
    count = (signals.shape[1] - size) // hop + 1 if count is None else count
    if not torch.compiler.is_exporting():  # runtimes have no views
        return signals.unfold(1, size, hop)[:, :count]
    # Whole hops are copied at once: gathering frames by the index of each sample is five times slower in runtimes.
    widths = [min(hop, size - first) for first in range(0, size, hop)]
    padded = functional.pad(signals, (0, -size % hop))
    return torch.cat([padded[:, i * hop:(i + count) * hop].unflatten(1, (count, hop))[..., :width]
                      for i, width in enumerate(widths)], 2)


def spectrum(frames: Tensor, matrix: Tensor, bins: int) -> Tensor:
    """Compute the power spectrum [B, T, bins / 2 + 1] of windowed frames [B, T, size].

    matrix : as made by :func:`fourier`, used in exported graphs
    """
    if torch.compiler.is_exporting():  # runtimes have a slow Fourier transform or none
        parts = product(frames, matrix)
        real, imaginary = (parts * parts).chunk(2, dim=2)  # square() would become a slow power
    else:
        real, imaginary = torch.view_as_real(torch.fft.rfft(frames, bins)).square().unbind(-1)
    return real + imaginary


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply [B, T, N] by [N, M]; in exported graphs as a convolution, which 8-bit quantization skips, except in
    fp64, for which runtimes have no convolution."""
    if torch.compiler.is_exporting() and x.dtype != torch.float64:
        return functional.conv1d(x.transpose(1, 2), matrix.t()[..., None]).transpose(1, 2)
    return torch.matmul(x, matrix)


def fourier(size: int, bins: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make the matrix [size, 2 (bins / 2 + 1)] from a frame to the real and imaginary parts of its spectrum."""
    # Integers modulo the period keep the angles exact.
    angles = torch.outer(torch.arange(size), torch.arange(bins // 2 + 1)) % bins
    angles = angles.double() * (2 * math.pi / bins)
    return torch.cat([angles.cos(), -angles.sin()], dim=1).to(dtype)


def kaldi_filters(sample_rate: int, bins: int, bands: int, low: float, high: float,
                  dtype: torch.dtype = torch.float32) -> Tensor:
    """Make triangular filters, evenly spaced on the mel scale: [bins / 2 + 1, bands].

    As in Kaldi, the highest bin is left out, and filters are computed in fp32: models were trained with its rounding.

    dtype : that of the computation
    """
    lowest = 1127.0 * math.log1p(low / 700.0)  # in mel
    highest = 1127.0 * math.log1p(high / 700.0)
    step = (highest - lowest) / (bands + 1)
    left = lowest + torch.arange(0.0, bands, dtype=dtype) * step
    centre = lowest + torch.arange(1.0, 1.0 + bands, dtype=dtype) * step
    right = lowest + torch.arange(2.0, 2.0 + bands, dtype=dtype) * step
    places = 1127.0 * (1.0 + torch.arange(bins // 2 + 1, dtype=dtype) * (sample_rate / bins) / 700.0).log()[:, None]
    filters = torch.minimum((places - left) / (centre - left), (right - places) / (right - centre)).clamp(min=0.0)
    filters[-1] = 0.0
    return filters.float()


def slaney_filters(sample_rate: int, bins: int, bands: int, low: float, high: float) -> Tensor:
    """Make filters [bins / 2 + 1, bands] that are triangles in Hertz, of equal area, spaced as in Slaney's toolbox:
    evenly up to 1 kHz, then by a constant factor."""
    def in_mels(hertz: float) -> float:
        return hertz / _LINEAR if hertz < 1000.0 else _BEND + math.log(hertz / 1000.0) / _FACTOR

    first, last = in_mels(low), in_mels(high)
    mels = first + torch.arange(bands + 2, dtype=torch.float64) * ((last - first) / (bands + 1))
    hertz = torch.where(mels < _BEND, mels * _LINEAR, 1000.0 * ((mels - _BEND) * _FACTOR).exp())
    left, centre, right = hertz[:-2], hertz[1:-1], hertz[2:]
    places = (torch.arange(bins // 2 + 1, dtype=torch.float64) * (sample_rate / bins))[:, None]
    filters = torch.minimum((places - left) / (centre - left), (right - places) / (right - centre)).clamp(min=0.0)
    return (filters * (2.0 / (right - left))).float()


_WINDOWS: dict[str, Callable[[int], Tensor]] = {
    "povey": lambda size: torch.hann_window(size, periodic=False, dtype=torch.float64).pow(_POVEY),
    "hann": lambda size: torch.hann_window(size, dtype=torch.float64)}
_FILTERS = {"kaldi": kaldi_filters, "slaney": slaney_filters}

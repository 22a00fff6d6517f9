"""The model for sherpa-onnx's streams does what a bundle's own streaming graph does, with its state in two caches."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from streaming_recognisers import BANDS, CHUNKS, LABELS, described, eager, recogniser, signals

from sbkit.export import layout
from sbkit.export.runners import open_runner
from sbkit.export.windows import Windows
from sbkit.nn.causal import CausalFrontEnd
from sbkit.nn.kaldi import FilterBank, framed
from sbkit.nn.streaming.layers import EncoderState
from sbkit.tasks.ctc import sherpa
from sbkit.tasks.ctc.exported import ExportedCTC
from sbkit.tasks.ctc.sherpa import CTCStream, SherpaOutput
from sbkit.tasks.recognise import sherpa_stream
from sbkit.tasks.recognise.sherpa_stream import chunk_milliseconds, packed, unpacked

MILLISECONDS, CHUNK = 160, 4


def bank(**changes):
    """The features that sherpa-onnx computes, but for their number."""
    return FilterBank(**{"n_mels": BANDS, "snip_edges": False, "remove_dc": False, "low": 0.0, "window": "hann",
                         "mel": "slaney", **changes})


@pytest.fixture(scope="module")
def stream():
    return CTCStream(recogniser(bank()), MILLISECONDS, None)


@pytest.fixture(scope="module")
def written(stream, tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("sherpa"), described(stream.graph)
    config.models = {stream.name: layout.MODELS[stream.name]}  # as an export describes what it writes
    stream.write(folder, config)
    return folder / config.models[stream.name]


sizes = st.integers(1, 4)


@given(st.tuples(sizes, sizes, sizes, sizes, sizes), st.integers(0, 3), st.randoms(use_true_random=False))
@pytest.mark.slow
def test_a_state_is_packed_into_caches_and_back(shape, around, drawn):
    """Rows stay rows, which sherpa-onnx stacks and takes apart again."""
    rows, layers, left, width, front = shape

    def made(*sizes):
        return torch.tensor([drawn.random() for _ in range(int(np.prod(sizes)))]).view(sizes)

    state = EncoderState(made(rows, layers, left, width), made(rows, layers, left, width),
                         made(rows, layers, width, around), made(rows, front), torch.arange(rows))
    caches = packed(state)
    assert [cache.dim() for cache in caches] == [4, 4, 1]
    assert sum(cache.numel() for cache in caches) == sum(part.numel() for part in state)
    stacked = tuple(torch.cat(parts) for parts in zip(*(packed(EncoderState(*(part[i:i + 1] for part in state)))
                                                        for i in range(rows)), strict=True))
    for each in (caches, stacked):
        for part, found in zip(state, unpacked(each, state.convolution.shape[1:]), strict=True):
            assert torch.equal(part, found)


@pytest.mark.long
@pytest.mark.slow
def test_each_step_gives_what_the_graph_for_streams_gives(stream, written):
    """In a batch of streams that are over at different times, from features of the same windows."""
    config, made = described(stream.graph), stream.graph
    ours, theirs = eager(made), open_runner(layout.ONNX, written)
    rows = []
    for signal in signals()[1:]:
        windows = Windows(config, CHUNK)
        rows.append(windows.feed(signal) + windows.finish())
    state = [part.numpy() for part in made.step.state(len(rows))]
    caches = [part.numpy() for part in packed(made.step.state(len(rows)))]
    for step in range(max(map(len, rows))):
        now = [row[step] if step < len(row) else None for row in rows]
        samples = np.stack([np.zeros(config.window(CHUNK), np.float32) if each is None else each.samples
                            for each in now])
        frames = np.array([0 if each is None else each.frames for each in now])
        features = made.bank.from_frames(framed(torch.from_numpy(samples), made.bank.size, made.bank.hop))
        expected, counts, *state = ours(samples, frames, *state)
        found, lengths, *caches = theirs(features.transpose(1, 2).numpy(), frames, *caches)
        assert lengths.tolist() == counts.tolist() and found.shape == (len(rows), CHUNK, LABELS)
        for i, count in enumerate(counts):
            np.testing.assert_allclose(found[i, :count], expected[i, :count], atol=1e-5)
        for mine, other in zip(packed(EncoderState(*map(torch.from_numpy, state))), caches, strict=True):
            np.testing.assert_allclose(other, mine.numpy(), atol=1e-5)
    assert step > 5 and caches[2].max() > CHUNK, "the left context was filled"


@pytest.mark.long
@pytest.mark.slow
def test_what_sherpa_onnx_reads_of_it_is_written_in_it(written):
    model = onnx.load(written)
    facts = {each.key: each.value for each in model.metadata_props}
    assert facts.pop("comment").endswith("2.0.1 or later")
    found = {name: int(value) for name, value in facts.items()}
    caches = {each.name: [size.dim_value for size in each.type.tensor_type.shape.dim][1:] for each in model.graph.input}
    assert (found["window_size"], found["chunk_shift"], found["subsampling_factor"]) == (16, 16, 4)
    assert found["vocab_size"] == LABELS - 1, "it counts the blank in"
    for name in ("cache_last_channel", "cache_last_time"):
        assert [found[f"{name}_dim{i}"] for i in (1, 2, 3)] == caches[name] and min(caches[name]) > 0
    assert caches["audio_signal"] == [BANDS, 16] and caches["cache_last_channel_len"] == []


def test_tokens_without_text_become_blanks_and_long_frames_are_repeated(stream):
    config = described(stream.graph)
    config.silent_ids, config.subsampling = [2, 3], 8
    log_probs = torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.1, 0.05, 0.05], [0.1, 0.5, 0.3, 0.1, 0.0, 0.0, 0.0]])[None].log()
    written = SherpaOutput(config, 0.04)(log_probs)
    assert written.argmax(-1).tolist() == [[0, 0, 1, 1]] and written[0, 0, 0] == log_probs[0, 0, 2]


@pytest.mark.parametrize("asked, expected", [(None, 160), (80, 80), (320, 320)])
def test_a_chunk_is_the_one_asked_for_or_the_nearest_to_640_ms(asked, expected):
    assert chunk_milliseconds(CHUNKS, 0.02 if asked is None else 0.04, asked) == expected


def exported(made, equal=False):
    """What the task exports of it, as far as targets look at it.

    equal : whether it normalises the loudness of recordings
    """
    keys = SimpleNamespace(sample_rate=16_000, tokenizer=SimpleNamespace(decode=str))
    whole = SimpleNamespace(normalize=None, encoder=SimpleNamespace(normalizes_loudness=equal))
    return ExportedCTC(whole, {}, 16_000, acoustic_model=made, keys=keys, run=None)


@pytest.fixture
def installed(monkeypatch):
    """sherpa-onnx, in the version that a test says, or the first that does."""
    monkeypatch.setattr(sherpa_stream, "imported", lambda: None)

    def of(version):
        monkeypatch.setattr(sherpa_stream, "version_of", lambda name: version)

    of("2.0.1")
    return of


def test_the_target_is_for_streams_where_whole_recordings_would_be_made_equally_loud(installed):
    whole = exported(recogniser(bank()))
    made, = whole.target(layout.SHERPA, 80)
    assert isinstance(made, CTCStream) and (made.milliseconds, made.chunk, made.tail) == (80, 2, 1280)
    reason = whole.left_out.pop("sherpa for whole recordings")
    assert reason.startswith("sherpa-onnx makes all recordings equally loud") and not whole.left_out


@pytest.mark.parametrize("window, kinds",
                         [("hann", [sherpa.SherpaWhole, CTCStream]), ("povey", [sherpa.SherpaWhole])])
def test_the_target_is_for_whole_recordings_too_where_it_can_be(installed, window, kinds):
    whole = exported(recogniser(bank(window=window)), equal=True)
    assert [type(each) for each in whole.target(layout.SHERPA)] == kinds
    assert ("sherpa-onnx computes" in whole.left_out.get("sherpa for streams", "")) == (len(kinds) == 1)


@pytest.mark.parametrize("version, old", [("1.12.0", True), ("2.0.0", True), ("2.0.1rc1", True), ("2.0.1", False),
                                          ("2.1.0", False), (None, False)])
def test_an_older_version_is_told_plainly_and_others_are_tried(installed, version, old):
    installed(version)
    with refused("missing-package") if old else contextlib.nullcontext():
        assert exported(recogniser(bank())).target(layout.SHERPA)


def test_a_missing_program_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "sherpa_onnx", None)
    with refused("missing-package"):
        exported(recogniser(bank())).target(layout.SHERPA)


@pytest.mark.parametrize("changes", [
    {"window": "povey"}, {"mel": "kaldi", "low": 20.0, "high": -400.0}, {"snip_edges": True},
], ids=lambda changes: next(iter(changes)))
def test_other_features_are_refused(installed, changes):
    with refused("sherpa-mismatch"):
        exported(recogniser(bank(**changes))).target(layout.SHERPA)


def test_shorter_frames_are_refused(installed):
    made = recogniser(bank(), input_size=24)
    made.frontend = CausalFrontEnd(BANDS, [4])
    with refused("sherpa-mismatch"):
        exported(made).target(layout.SHERPA)


def test_a_chunk_that_the_model_did_not_learn_is_refused(installed):
    with refused("untrained-chunk"):
        exported(recogniser(bank())).target(layout.SHERPA, 100)
    made = recogniser(bank())
    made.chunks = None
    with refused("no-chunks"):
        exported(made).target(layout.SHERPA, 160)

"""A model that learnt in chunks, from its run's checkpoint over its bundle to the words of a stream."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from streaming_bundles import exported

import sbkit.infer
from sbkit.decode.spans import collapse
from sbkit.export.layout import CONFIG, Config
from sbkit.export.windows import Windows
from sbkit.runs.restore import load_run
from sbkit.tasks.recognise.graph import reference

pytestmark = pytest.mark.slow  # its export takes some seconds
CHUNKS = {320: 8, 640: 16}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return exported(tmp_path_factory)


@pytest.fixture(scope="module")
def bundle(made, tmp_path_factory):
    to = shutil.copytree(made.bundle, tmp_path_factory.mktemp("results") / "bundle")
    config = Config.read(to)
    config.word_separator = None  # each token is a word: a model that wasn't trained seldom says that one begins
    (to / CONFIG).write_text(config.to_json())
    return to


@pytest.fixture(scope="module")
def model(bundle):
    """In torch, tasks/recognise/test_streams.py has the graph and test_stream_engine.py what runs it."""
    with sbkit.infer.load(bundle, model="onnx", device="cpu", threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def signal():
    """Some seconds in which things sound different, with silences."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=4_000) * loud * np.sin(np.arange(4_000) * rng.uniform(0.02, 2))
             for loud in (0.3, 0.0, 0.1, 0.8, 0.2, 0.0, 0.0, 0.0, 0.5, 0.4, 0.6, 0.05)]
    return np.concatenate(parts).astype(np.float32)[:47_123]


def words_of(model, log_probs):
    """The words that greedy decoding finds in log-probabilities [T, V]."""
    confidence = np.exp(log_probs.max(-1))[None]
    spans = collapse(log_probs.argmax(-1)[None], confidence, model.engine.config.blank_id)[0]
    return model.engine.vocabulary.spelling.words(spans)


def same(words, others):
    return [word.text for word in words] == [word.text for word in others] and all(
        (one.start, one.end, one.confidence) == pytest.approx((other.start, other.end, other.confidence), abs=1e-3)
        for one, other in zip(words, others, strict=True))


def settled(results):
    return [word for each in results for word in each.settled]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_streams_words_match_the_checkpoints_masked_forward(made, model, signal, chunk):
    acoustic_model = load_run(made.run, "cpu")[1].acoustic_model
    log_probs = reference(acoustic_model, chunks=acoustic_model.chunks.config(CHUNKS[chunk]))(signal)
    results, end = settled(model.stream(chunk)(signal)), len(signal) / model.engine.config.sample_rate
    whole = [replace(word, end=min(word.end, end)) for word in words_of(model, log_probs)]  # the audio's, not a frame's
    assert len(results) > 5 and same(results, whole)


def test_one_chunk_over_the_whole_matches_a_recording(model, signal):
    """Chunk by chunk a frame sees less than in the whole; within one chunk it sees all of it."""
    config = model.engine.config
    windows = Windows(config, 400)
    (window,) = windows.feed(signal) + windows.finish()
    model.stream()
    engine = model._streams
    log_probs = engine.worker.submit(engine.step, [window], [engine.state()]).result()[0]
    found = model.transcribe(signal)
    assert len(found.words) > 5 and same(words_of(model, log_probs), found.words)

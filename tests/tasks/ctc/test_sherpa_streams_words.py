"""A run that learnt in chunks is exported for sherpa-onnx, which then outputs the same words for a stream as we do."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import onnx
import pytest
from streaming_bundles import exported, exported_for_sherpa, sherpa_hears_streams

import sbkit.infer
from sbkit.cli import main
from sbkit.decode.greedy_stream import GreedyStream
from sbkit.decode.spans import best_path, collapse
from sbkit.export import clips, gate, layout, parity_report, source
from sbkit.export.layout import Config
from sbkit.export.runners import open_runner
from sbkit.export.vocabulary import Vocabulary
from sbkit.tasks.recognise import sherpa_stream, streaming_graph

pytestmark = [pytest.mark.slow, pytest.mark.long]  # an export takes some seconds

TAIL = 10_240  # samples of silence that README.md gives, 640 ms
MOVES = 7_680  # from one window to the next
LENGTHS = (300, 9_999, 10_240, 40_007)


@pytest.fixture(scope="module")
def sherpa_onnx():
    found = pytest.importorskip("sherpa_onnx", reason="sherpa-onnx is not installed")
    if not sherpa_hears_streams():
        pytest.skip(f"before {sherpa_stream.VERSION}, sherpa-onnx computed other features for streams")
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return exported(tmp_path_factory).run


@pytest.fixture(scope="module")
def made(sherpa_onnx, tmp_path_factory):
    return exported_for_sherpa(tmp_path_factory).bundle


@pytest.fixture(scope="module")
def recognizer(made, sherpa_onnx):
    return sherpa_onnx.OnlineRecognizer.from_nemo_ctc(
        model=str(made / "stream.sherpa.onnx"), tokens=str(made / "tokens.txt"), num_threads=1)


def signals():
    drawn = np.random.default_rng(0)
    return [(np.sin(np.arange(size) * drawn.uniform(0.05, 0.3)) * drawn.uniform(0.05, 0.3)
             + 0.02 * drawn.standard_normal(size)).astype(np.float32) for size in LENGTHS]


def scores(made, signal, chunk=16):
    """The log-probabilities of the windows that sherpa-onnx uses, by the bundle's own streaming graph."""
    config, tail = Config.read(made), 640 * chunk
    found, = streaming_graph.run(open_runner(layout.ONNX, made / "stream.onnx"), config, chunk,
                                 [np.concatenate([signal, np.zeros(tail, np.float32)])])
    behind = (len(signal) + tail + 80) // 160 - 1 - 4 * chunk
    moves = chunk - config.streaming.ahead
    return found[: (behind // (4 * moves) + 1) * moves]


def ours(made, signal):
    """The text that our own search of the stream settles, without spaces, which it puts into pauses too."""
    config, log_probs = Config.read(made), scores(made, signal)
    search = GreedyStream(Vocabulary.read(made, config).spelling)
    results = [each for piece in np.split(log_probs, len(log_probs) * 640 // MOVES) for each in search.feed(piece)]
    return "".join(word.text for each in [*results, search.finish()] for word in each.settled)


def result_of(recognizer, signal, tail=TAIL):
    stream = recognizer.create_stream()
    stream.accept_waveform(16_000, sherpa_stream.with_silence(signal, tail))
    stream.input_finished()
    while recognizer.is_ready(stream):
        recognizer.decode_stream(stream)
    return recognizer.get_result_all(stream)


def letters(text):
    return "".join(text.split())


def test_the_bundle_has_the_model_and_says_what_it_was_compared_with(made):
    config, parity = Config.read(made), json.loads((made / "parity.json").read_text())
    assert config.models == {"onnx": "model.onnx", "sherpa stream": "stream.sherpa.onnx"}
    found = parity["sherpa stream"]["640 ms"]["sherpa"]
    assert found["words_changed"] == 0 and found["bytes"] == (made / "stream.sherpa.onnx").stat().st_size
    assert "stream.sherpa.onnx" in config.files
    with sbkit.infer.load(made, device="cpu") as model:
        assert len(model.engine.run([np.zeros(16_000, np.float32)])[0]) == 25, "it runs as any other"


def test_its_readme_shows_how_to_run_it_and_it_hears_our_own_words(made, sherpa_onnx, capsys, monkeypatch):
    code, = re.findall(r"### Streams in sherpa-onnx, version 2\.0\.1 or later\n\n```python\n(.*?)```",
                       (made / "README.md").read_text(), re.S)
    monkeypatch.chdir(made)
    for signal in signals():
        exec(code, {"pieces": np.array_split(signal, 7)})
        shown = capsys.readouterr().out.splitlines()
        assert letters(shown[-1]) == ours(made, signal) != ""
        windows = max(0, (len(signal) - 1 - TAIL) // MOVES + 1)
        assert len(shown) == windows + 1 and all(shown[-1].startswith(each) for each in shown)


def test_streams_in_a_batch_are_heard_as_alone(made, recognizer):
    opened_ = [recognizer.create_stream() for _ in LENGTHS]
    for stream, signal in zip(opened_, signals(), strict=True):
        stream.accept_waveform(16_000, sherpa_stream.with_silence(signal, TAIL))
        stream.input_finished()
    while ready := [stream for stream in opened_ if recognizer.is_ready(stream)]:
        recognizer.decode_streams(ready)
    for stream, signal in zip(opened_, signals(), strict=True):
        assert letters(recognizer.get_result(stream)) == ours(made, signal)


def starts(log_probs):
    """The times at which our own search of all of them has tokens begin."""
    labels, confidence = best_path(log_probs[None], np.array([len(log_probs)]))
    return collapse(labels, confidence)[0].starts * 0.04


def test_times_are_ours(made, recognizer):
    expected = starts(scores(made, signals()[-1]))
    assert len(expected) > 10 and np.allclose(result_of(recognizer, signals()[-1]).timestamps, expected)


@pytest.mark.parametrize("samples", [9_999, 10_240, 40_007])
def test_without_silence_after_it_the_end_of_a_stream_is_not_heard(made, recognizer, samples):
    signal = next(each for each in signals() if len(each) == samples)
    without, whole = (letters(result_of(recognizer, signal, tail).text) for tail in (0, TAIL))
    assert whole.startswith(without) and len(without) < len(whole)


def tried(run, made, folder, chunk=None):
    """The comparison of a run's model in sherpa-onnx, written into a folder, as an export makes it."""
    found, config = source.open_run(run), Config.read(made)
    shutil.copy(made / "tokens.txt", folder)
    target, = found.exported.target("sherpa", chunk)
    target.write(folder, config)
    comparison = found.exported.comparison(clips.choose_clips(found.keys.corpus, 16_000, 3), config, folder)
    target.compare(folder, config, comparison)
    return comparison


def test_another_chunk_of_those_that_it_learnt_can_be_asked_for(run, made, sherpa_onnx, tmp_path):
    comparison = tried(run, made, tmp_path, 320)
    assert gate.failures(comparison) == []
    assert "sherpa stream, 320 ms, sherpa" in parity_report.table(comparison)
    recognizer = sherpa_onnx.OnlineRecognizer.from_nemo_ctc(
        model=str(tmp_path / "stream.sherpa.onnx"), tokens=str(tmp_path / "tokens.txt"), num_threads=1)
    assert np.allclose(result_of(recognizer, signals()[-1], 5_120).timestamps, starts(scores(made, signals()[-1], 8)))


def test_one_that_hears_other_words_in_sherpa_onnx_is_refused(run, made, sherpa_onnx, tmp_path, monkeypatch):
    def write_forgetful(_, path, *facts):
        model = onnx.load(made / "stream.sherpa.onnx")
        for node in list(model.graph.node):
            for i, name in enumerate(node.output):
                if name.endswith("_next"):
                    node.output[i] = f"{name}_kept"
                    model.graph.node.append(onnx.helper.make_node("Sub", [f"{name}_kept"] * 2, [name]))
        onnx.save(model, path)

    monkeypatch.setattr(sherpa_stream, "trace_module", lambda *_: None)
    monkeypatch.setattr(sherpa_stream, "write_onnx", write_forgetful)
    failure, = gate.failures(tried(run, made, tmp_path))
    assert re.fullmatch(r"sherpa stream, 640 ms, sherpa: [2-5] of 5 clips have different words \(.+\)", str(failure))


@pytest.mark.parametrize("words, told", [
    ([], "--chunk is for --target"), (["--target", "sherpa"], "the model wasn't trained for chunks of 100 ms")])
def test_a_chunk_that_makes_no_sense_is_told_before_anything_is_made(run, tmp_path, capsys, words, told):
    assert main(["export", str(run), "--to", str(tmp_path / "b"), *words, "--chunk", "100"]) == 2
    assert told in capsys.readouterr().err and list(tmp_path.iterdir()) == []

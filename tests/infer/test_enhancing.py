"""Recordings without their noise: of any length, rate and format, in files with safe names, and streams in pieces."""

import io
import shutil
import tracemalloc

import bundles
import enhancers
import numpy as np
import pytest
import soundfile
import torch
import toy_codec
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import sbkit.infer
from sbkit.cli import main
from sbkit.export import layout
from sbkit.infer.enhancer import PIECE_SECONDS
from sbkit.infer.graph_model import GraphEngine, GraphModel
from sbkit.serve.served_kinds import SERVED, ServedGraph

pytestmark = pytest.mark.slow

#: How far samples of a stream may be from those of the whole.
TOLERANCE = 1e-4
RATE = enhancers.RATE


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return enhancers.make(tmp_path_factory.mktemp("enhancer") / "bundle")


@pytest.fixture(scope="module")
def model(bundle):
    with sbkit.infer.load(bundle, device="cpu", threads=1) as model:
        yield model


def noise(samples, seed=0):
    return (0.1 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def whole(signal):
    """What the checkpoint makes of it."""
    with torch.no_grad():
        return enhancers.enhancer()(torch.from_numpy(signal)[None], torch.tensor([len(signal)]))[0].numpy()


def enhance(*words):
    return main(["enhance", *map(str, words), "--device", "cpu", "--threads", "1"])


@pytest.mark.parametrize("samples", [1, 100, enhancers.HOP, RATE, round(2.5 * PIECE_SECONDS * RATE)])
def test_an_enhanced_recording_matches_the_checkpoint(model, samples):
    found = model.enhance(noise(samples))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, whole(noise(samples)), atol=TOLERANCE)


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 700), max_size=8), seconds=st.sampled_from([0.0, 0.02, 0.1]),
       seed=st.integers(0, 2**31))
def test_stream_output_does_not_depend_on_the_pieces(model, sizes, seconds, seed):
    signal, stream, found, at = noise(sum(sizes), seed), model.stream(seconds), [], 0
    for size in sizes:
        found.append(stream.feed(signal[at : at + size]))
        at += size
        waits = at - sum(map(len, found))
        assert 0 <= waits <= model.engine.config.delay + max(1, round(seconds * RATE / enhancers.HOP)) * enhancers.HOP
    found = np.concatenate([*found, stream.finish()])
    assert len(found) == len(signal) and not len(stream.finish())
    if len(signal):
        np.testing.assert_allclose(found, whole(signal), atol=TOLERANCE)


def test_the_graph_for_whole_recordings_matches_the_checkpoint(bundle):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(bundle / "model.onnx"), providers=["CPUExecutionProvider"])
    signals = np.stack([noise(5000), noise(5000, 1)])
    found, lengths = session.run(None, {"signals": signals, "lengths": np.array([5000, 1234])})
    np.testing.assert_allclose(found[0], whole(signals[0]), atol=TOLERANCE)
    np.testing.assert_allclose(found[1, :1234], whole(signals[1, :1234]), atol=TOLERANCE)
    assert lengths.tolist() == [5000, 1234] and not found[1, 1234:].any()


def test_a_server_answers_with_the_enhanced_recording(bundle):
    """As for any model whose first output is sound."""
    assert SERVED.of(layout.read(bundle)) is ServedGraph
    signal = noise(9000)
    with GraphModel(GraphEngine(bundle, device="cpu")) as loaded:
        sound, rate = soundfile.read(io.BytesIO(loaded.run(signal).wav(RATE, len(signal))), dtype="float32")
    assert rate == RATE
    np.testing.assert_allclose(sound, whole(signal), atol=1e-3)  # of 16 bits


def test_files_of_any_rate_and_format_become_wavs(bundle, tmp_path, capsys):
    sources = {"one.wav": (RATE, 1.3), "two.flac": (44_100, 0.7), "three.mp3": (22_050, 2.0), "-rf.wav": (8000, 0.4)}
    for name, (rate, seconds) in sources.items():
        soundfile.write(tmp_path / name, noise(round(rate * seconds)), rate)
    (tmp_path / "broken.wav").write_bytes(b"RIFF no sound")
    to = tmp_path / "made" / "here"
    assert enhance(bundle, tmp_path, "--to", to) == 1, "one is damaged"
    captured = capsys.readouterr()
    assert "4 recordings, 4.4 s" in captured.out and "left out:" in captured.err and "broken.wav" in captured.err
    assert sorted(path.name for path in to.iterdir()) == ["_-rf.wav", "one.wav", "three.wav", "two.wav"]
    for name, (_, seconds) in sources.items():
        sound, rate = soundfile.read(to / f"{'_' if name[0] == '-' else ''}{name.split('.')[0]}.wav")
        assert rate == RATE and len(sound) / rate == pytest.approx(seconds, abs=0.1)
    one, _ = soundfile.read(to / "one.wav", dtype="float32")
    said, _ = soundfile.read(tmp_path / "one.wav", dtype="float32")
    np.testing.assert_allclose(one, whole(said), atol=1e-3)  # of 16 bits
    before = {path: path.stat().st_mtime_ns for path in to.iterdir()}
    assert enhance(bundle, tmp_path / "one.wav", "--to", to) == 0
    assert "1 are already enhanced" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in to.iterdir()} == before
    assert enhance(bundle, tmp_path / "one.wav", "--to", to, "--overwrite") == 0
    assert (to / "one.wav").stat().st_mtime_ns != before[to / "one.wav"]


def test_a_recording_is_never_overwritten(bundle, tmp_path, capsys):
    soundfile.write(tmp_path / "a.wav", noise(4000), RATE)
    before = (tmp_path / "a.wav").read_bytes()
    assert enhance(bundle, tmp_path / "a.wav", "--to", tmp_path, "--overwrite") == 2
    assert "[output-is-input]" in capsys.readouterr().err
    assert enhance(bundle, tmp_path / "a.wav", "--to", tmp_path / "a.wav") == 2
    assert "[bad-option]" in capsys.readouterr().err
    assert (tmp_path / "a.wav").read_bytes() == before


def test_memory_does_not_grow_with_the_recording(bundle, tmp_path):
    """The peak of what numpy and Python hold; blocks of a recording have ten seconds."""
    peaks = []
    for minutes in (1, 6):
        path = tmp_path / f"{minutes}.wav"
        with soundfile.SoundFile(path, "w", 8000, 1) as file:
            for minute in range(minutes):
                file.write(noise(60 * 8000, minute))
        tracemalloc.start()
        assert enhance(bundle, path, "--to", tmp_path / "out") == 0
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert soundfile.info(tmp_path / "out" / f"{minutes}.wav").duration == pytest.approx(60 * minutes, abs=0.01)
    assert peaks[1] < 1.5 * peaks[0] < 2e7 * 1.5


def test_another_bundle_is_refused(tmp_path, capsys):
    codec = toy_codec.make(tmp_path / "codec")
    assert enhance(codec, "x.wav", "--to", tmp_path / "out") == 2
    assert "[wrong-bundle-kind]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_graph_with_wrong_output_is_refused(bundle, tmp_path):
    """Of another hop than the configuration says."""
    folder = bundles.change(shutil.copytree(bundle, tmp_path / "b"), hop=8)
    with refused("damaged-bundle", wording=False):
        sbkit.infer.load(folder, device="cpu")

"""A run at 8 kHz: trained, scored, exported, transcribed and served at that rate, whatever rate a recording has.

A word is a tone, an octave from the next one: whoever takes samples at 8 kHz for ones at 16 kHz, or the other way
round, hears another word, at other times.
"""

import io
import itertools
import json

import httpx
import numpy as np
import pytest
import serving
import soundfile
import soxr
import torch
from processes import sbkit
from trained_runs import metrics
from websockets.sync.client import connect

from sbkit import infer
from sbkit.cli import main
from sbkit.export.layout import Config
from sbkit.runs.restore import load_run

pytestmark = [pytest.mark.slow, pytest.mark.long]
RATE, OTHERS = 8_000, (16_000, 44_100)
HERTZ = {"low": 300, "mid": 600, "top": 1200}
SAID = ["top", "low", "mid", "top"]
KEYS = ("--sample_rate 8000 --d_model 32 --nhead 2 --num_encoder_layers 1 --num_decoder_layers 1 --d_ffn 64 "
        "--cnn_first_channels 4 --cnn_channels 4 --dropout 0 --spec_augment null --intermediate_ctc 0 --num_workers 1 "
        "--number_of_epochs 3 --min_steps 240 --step_seconds 8 --lr 0.008 --schedule.max_rise_per_step null "
        "--precision fp32 --device cpu --noprogressbar").split()


def spoken(words, seed):
    """A tone for each word, with silence around it: the signal [S] at 8 kHz, and from when to when each sounds, in
    seconds."""
    drawn, parts, sounds = np.random.default_rng(seed), [np.zeros(RATE // 6)], []
    for word in words:
        time = np.arange(round(drawn.uniform(0.35, 0.5) * RATE)) / RATE
        begin = sum(map(len, parts)) / RATE
        sounds.append((begin, begin + len(time) / RATE))
        parts += [0.3 * np.sin(2 * np.pi * HERTZ[word] * time), np.zeros(RATE // 4)]
    signal = np.concatenate(parts)
    return (signal + 0.005 * drawn.standard_normal(len(signal))).astype(np.float32), sounds


def while_they_sound(starts, sounds):
    """Whether each word begins while its tone sounds: CTC says it anywhere in there."""
    return [begin <= start <= end for start, (begin, end) in zip(starts, sounds, strict=True)] == [True] * len(sounds)


def written(signal, rate, to):
    """The same recording as a file of another rate."""
    soundfile.write(to, soxr.resample(signal, RATE, rate), rate, format="WAV")
    return to


def corpus(folder):
    """Every second recording is at 16 kHz."""
    (folder / "wavs").mkdir()
    for number, (split, count) in enumerate({"train": 120, "dev": 6, "test": 8}.items()):
        lines = ["ID,duration,wav,wrd"]
        for i in range(count):
            drawn = np.random.default_rng([number, i])
            words = drawn.choice(list(HERTZ), drawn.integers(1, 5)).tolist()
            signal, _ = spoken(words, [number, i, 1])
            path = written(signal, (RATE, OTHERS[0])[i % 2], folder / "wavs" / f"{split}{i}.wav")
            lines.append(f"{split}{i},{len(signal) / RATE:.4f},{path},{' '.join(words)}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = corpus(tmp_path_factory.mktemp("narrow"))
    sbkit("train", "hparams/ctc.yaml", *KEYS, "--data_folder", folder, "--output_folder", folder / "run")
    sbkit("export", folder / "run", "--to", folder / "bundle", "--formats", "onnx", "--clips", 3)
    return folder


@pytest.fixture(scope="module")
def model(home):
    with infer.load(home / "bundle", device="cpu", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def server(home):
    with serving.serving(home / "bundle", names=("narrow",)) as server:
        yield server


def test_the_run_learns_and_is_scored_at_its_rate(home, capsys):
    assert [line["test_WER"] for line in metrics(home / "run", "test")] == [0.0]
    assert main(["evaluate", str(home / "run"), "--device", "cpu", "--workers", "0"]) == 0
    facts = json.loads((home / "run" / "evaluations" / "test-best" / "result.json").read_text())
    assert (facts["WER"], facts["utterances"]) == (0.0, 8)


def test_the_bundle_makes_the_frames_that_the_run_makes(home, model):
    config = Config.read(home / "bundle")
    assert (config.sample_rate, config.hop_samples) == (RATE, RATE // 100)
    signal, _ = spoken(SAID, 1)
    [found] = model.engine.run([signal])
    _, brain = load_run(home / "run", "cpu")
    acoustic_model = brain.acoustic_model
    with torch.no_grad():
        feats, frames = acoustic_model.features(torch.from_numpy(signal)[None], torch.tensor([len(signal)]))
        encoded, frames = acoustic_model.encode(feats, frames)
        scores = acoustic_model.head(encoded).log_softmax(-1)[0]
    assert feats.shape[1] == 100 * len(signal) // RATE + 1
    assert len(found) == frames.item() == len(scores)
    np.testing.assert_allclose(found, scores.numpy(), atol=1e-3)


@pytest.mark.parametrize("rate", [RATE, *OTHERS])
def test_a_recording_of_any_rate_is_heard_alike(model, rate, tmp_path):
    signal, sounds = spoken(SAID, 2)
    heard = model.transcribe(written(signal, rate, tmp_path / "recording.wav"))
    assert heard.text.split() == SAID
    assert heard.duration == pytest.approx(len(signal) / RATE, abs=0.01)
    assert while_they_sound([word.start for word in heard.words], sounds)


@pytest.mark.parametrize("rate", [RATE, *OTHERS])
def test_the_server_hears_it_too(server, rate):
    signal, sounds = spoken(SAID, 3)
    file = written(signal, rate, io.BytesIO()).getvalue()
    answer = httpx.post(f"{server.base}/audio/transcriptions", files={"file": ("a.wav", file)}, timeout=60, data={
        "model": "narrow", "response_format": "verbose_json", "timestamp_granularities[]": "word"}).json()
    assert answer["text"].split() == SAID
    assert answer["duration"] == pytest.approx(len(signal) / RATE, abs=0.01)
    assert while_they_sound([word["start"] for word in answer["words"]], sounds)


@pytest.mark.parametrize("rate", [RATE, OTHERS[0]])
def test_and_so_does_it_live(server, rate):
    signal, sounds = spoken(SAID, 4)
    samples = np.round(32767 * soxr.resample(signal, RATE, rate)).astype("<i2").tobytes()
    with connect(server.live) as socket:
        socket.send(json.dumps({"type": "start", "model": "narrow", "sample_rate": rate}))
        for i in range(0, len(samples), rate // 5):
            socket.send(samples[i : i + rate // 5])
        socket.send('{"type": "stop"}')
        messages = []
        while not messages or messages[-1]["type"] not in ("done", "error"):
            messages.append(json.loads(socket.recv(60)))
    words = list(itertools.chain.from_iterable(each["words"] for each in messages if each["type"] == "final"))
    assert [word["word"] for word in words] == SAID
    assert while_they_sound([word["start"] for word in words], sounds)
    assert messages[-1] == {"type": "done", "duration": pytest.approx(len(signal) / RATE, abs=0.02)}

"""``sbkit run``: tensors of recordings as lines of JSON, arrays or sound."""

import json
import shutil

import bundles
import graph_bundles
import numpy as np
import pytest
import soundfile
from refusals import refused

import sbkit.infer
from sbkit.cli import main
from sbkit.export.exported import Exported
from sbkit.export.layout import LabelsConfig
from sbkit.infer.device import OutOfMemory
from sbkit.infer.graph_model import GraphEngine, Output
from sbkit.infer.recordings import Recording


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return graph_bundles.make(tmp_path_factory.mktemp("b") / "bundle")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return graph_bundles.make(tmp_path_factory.mktemp("b") / "bundle", sound=True)


@pytest.fixture
def clips(tmp_path):
    """A folder with clips, one of them in a folder of its own."""
    for name, level, samples in (("quiet.wav", 0.05, 900), ("deep/loud.wav", 0.5, 700)):
        path = tmp_path / "clips" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, np.full(samples, level, np.float32), graph_bundles.RATE, subtype="FLOAT")
    return tmp_path / "clips"


def run(*words):
    return main(["run", *map(str, words)])


@pytest.fixture
def batches(monkeypatch):
    """The lengths of the signals in each batch that runs."""
    lengths = []
    run = GraphEngine.run_batch
    monkeypatch.setattr(GraphEngine, "run_batch",
                        lambda engine, signals: (lengths.append([*map(len, signals)]), run(engine, signals))[1])
    return lengths


def mixed_clips(count):
    """Clips of 1 to 7 s, each of another level."""
    seconds = np.random.default_rng(0).integers(1, 8, count)
    return [np.full(length * graph_bundles.RATE, 0.001 * number, np.float32) for number, length in enumerate(seconds)]


def test_batches_have_the_outputs_of_each_recording_alone(sound, batches):
    clips = mixed_clips(60)
    with sbkit.infer.load(sound, device="cpu") as model:
        batches.clear()
        outputs = model.run(clips)
        together = [*batches]
        alone = [model.run(clip) for clip in clips]
    limit = 20 * graph_bundles.RATE
    assert sum(map(len, together)) == 60 and len(together) < 30
    assert all(len(lengths) * max(lengths) <= limit for lengths in together)
    padding = sum(len(lengths) * max(lengths) - sum(lengths) for lengths in together)
    assert padding < 0.2 * sum(map(len, clips)), "those of like length run together"
    for one, other in zip(outputs, alone, strict=True):
        assert one.outputs["quieter"] == pytest.approx(other.outputs["quieter"])


def test_a_long_list_is_read_lazily(sound, batches):
    """Of 100 recordings of 7 s, few are in memory when the first batch runs."""
    read = []

    class Noted(Recording):
        def samples(self, rate):
            read.append(self)
            return super().samples(rate)

    with sbkit.infer.load(sound, device="cpu") as model:
        recordings = [Noted(np.zeros(7 * graph_bundles.RATE, np.float32)) for _ in range(100)]
        next(model.run_each(recordings))
    assert len(read) <= 14


def test_a_batch_out_of_memory_is_run_one_by_one(sound, monkeypatch):
    run = GraphEngine.run_batch

    def small(engine, signals):
        if len(signals) > 1:
            raise OutOfMemory("out-of-memory", "too much")
        return run(engine, signals)

    monkeypatch.setattr(GraphEngine, "run_batch", small)
    clips = mixed_clips(5)
    with sbkit.infer.load(sound, device="cpu") as model:
        assert [len(output.outputs["quieter"]) for output in model.run(clips)] == [*map(len, clips)]


def test_the_command_runs_recordings_in_batches(bundle, clips, batches, capsys):
    (clips / "broken.wav").write_bytes(b"RIFF no audio")
    assert run(bundle, clips / "quiet.wav", clips / "broken.wav", clips / "deep") == 1
    assert [900, 700] in batches
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["quiet", "loud"]


@pytest.mark.slow
def test_each_recording_is_a_line_of_json_in_the_order_given(bundle, clips, capsys):
    assert run(bundle, clips / "quiet.wav", clips / "deep") == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [(line["id"], line["label"]) for line in lines] == [("quiet", "quiet"), ("loud", "loud")]
    assert lines[1]["level"] == pytest.approx([-0.4, 0.4]) and lines[0]["level"] == pytest.approx([0.05, -0.05])
    assert "model.onnx on cpu" in captured.err and "2 of 2 recordings" in captured.err


@pytest.mark.slow
def test_a_model_of_several_labels_gives_those_that_reach_their_thresholds(clips, tmp_path, capsys):
    bundle = graph_bundles.make(tmp_path / "bundle", thresholds=[-0.5, 0.3])
    assert run(bundle, clips) == 0
    lines = {line["id"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert lines["quiet"]["labels"] == pytest.approx({"quiet": 0.05})
    assert list(lines["deep/loud"]["labels"].items()) == [("loud", pytest.approx(0.4)), ("quiet", pytest.approx(-0.4))]
    assert "label" not in lines["quiet"] and lines["quiet"]["level"] == pytest.approx([0.05, -0.05])
    with sbkit.infer.load(bundle, device="cpu") as model:
        assert model.run(np.zeros(700, np.float32)).labels == pytest.approx({"quiet": 0.1})


@pytest.mark.parametrize("changes", [
    {"thresholds": [0.5]}, {"thresholds": [0.5, float("nan")]}, {"labels": ["quiet", "quiet"]},
    {"lengths": {"level": "level"}},
])
def test_labels_and_thresholds_that_do_not_fit_are_refused(tmp_path, changes):
    config = {"sample_rate": 8000, "outputs": ["level"], "labels": ["quiet", "loud"], "thresholds": [0.5, 0.5]}
    with refused("damaged-bundle"):
        LabelsConfig.of(config | changes, tmp_path)


def test_npz_files_are_named_by_ids(bundle, clips, tmp_path, capsys):
    assert run(bundle, clips, "--to", tmp_path / "out", "--format", "npz,json") == 0
    assert capsys.readouterr().out == ""
    with np.load(tmp_path / "out" / "deep" / "loud.npz") as found:
        assert found["level"] == pytest.approx([-0.4, 0.4])
    assert json.loads((tmp_path / "out" / "quiet.json").read_text())["label"] == "quiet"


@pytest.mark.slow
def test_wav_output_has_no_padding(sound, clips, tmp_path):
    assert run(sound, clips, "--to", tmp_path / "out", "--format", "wav") == 0
    found, rate = soundfile.read(tmp_path / "out" / "deep" / "loud.wav")
    assert rate == graph_bundles.RATE and len(found) == 700 and found == pytest.approx(np.full(700, 0.25), abs=1e-4)


def test_every_recording_that_cannot_be_read_is_left_out_and_named(bundle, clips, capsys):
    for number in range(25):
        (clips / f"broken{number}.wav").write_bytes(b"RIFF no audio")
    assert run(bundle, clips) == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2 and "2 of 27" in captured.err
    assert all(f"left out: {clips}/broken{number}.wav" in captured.err for number in range(25))


@pytest.mark.parametrize("words, code", [
    (["--format", "wav"], "missing-option"), (["--format", "wav", "--to", "out"], "not-a-waveform"),
    (["--format", "mp3"], "bad-option"),
])
def test_wav_needs_a_folder_and_a_waveform(bundle, clips, words, code, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(bundle, clips, *words) == 2
    assert f"[{code}]" in capsys.readouterr().err and not [*tmp_path.glob("out/**/*.*")]


@pytest.mark.slow
def test_large_outputs_are_not_printed(sound, tmp_path, capsys):
    soundfile.write(tmp_path / "long.wav", np.zeros(11_000, np.float32), graph_bundles.RATE)
    assert run(sound, tmp_path / "long.wav") == 2
    assert "[missing-option]" in capsys.readouterr().err


def test_labels_that_are_not_the_models_are_refused_at_start(bundle, tmp_path):
    folder = bundles.change(shutil.copytree(bundle, tmp_path / "b"), labels=["quiet", "loud", "louder"])
    with refused("mismatched-bundle"):
        GraphEngine(folder)


def test_an_output_per_frame_is_not_written_as_wav():
    made = Output({"speech": np.zeros(50, np.float32), "frames": np.array(50)}, lengths={"speech": "frames"})
    with refused("not-a-waveform"):
        made.wav(16_000, 8_000)
    assert len(made.wav(16_000, 50)) == 44 + 2 * 50


def test_outputs_that_are_not_named_are_refused_before_they_are_exported():
    with refused("wrong-export-outputs"):
        Exported(graph_bundles.Quieter(), {"quieter": ("batch", "samples")}, graph_bundles.RATE).trace()

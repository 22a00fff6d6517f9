"""A transducer's export: three graphs that are held against the checkpoint, and words of all of them together."""

import json
import shutil

import numpy as np
import pytest
import soundfile
import torch
from random_joint import Joint, drawn
from run_folders import corpus
from streaming_bundles import put_for_traces, sherpa_hears_streams
from streaming_runs import RECIPE, saved

from sbkit.cli import main
from sbkit.data.manifest import Manifest
from sbkit.decode import lm
from sbkit.decode.transducer import MAX_TOKENS_PER_FRAME, TransducerSearch
from sbkit.export import layout
from sbkit.infer import load
from sbkit.tasks.transducer import exported
from sbkit.tasks.transducer.exported import SearchMeasure, SearchPath

TRANSDUCER = RECIPE.with_name("transducer.yaml")


def says_something(brain):
    """At most four tokens in a frame, which sherpa-onnx takes as speech has no more; others' are endless."""
    brain.acoustic_model.normalize.set_statistics(torch.full((80,), -5.0), torch.full((80,), 2.0))
    for seed, part in ((449, brain.keys.transducer), (11, brain.acoustic_model.head)):
        torch.manual_seed(seed)
        for weights in part.parameters():
            weights.data.normal_(std=2.0)
    brain.keys.transducer.out.bias.data[0] = 6.0


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("transducer") / "data", train=6, dev=2, test=3)


@pytest.fixture(scope="module")
def made(data):
    """Makes a run by its name, with these keys."""
    def make(name, **keys):
        (data.parent / name).mkdir()
        return saved(data.parent / name, data, says_something, TRANSDUCER, num_encoder_layers=1, joint_size=12, **keys)

    return make


@pytest.fixture(scope="module")
def run(made):
    return made("run")


class Recorder:
    """A joint network that keeps what it was asked, one row at a time."""

    def __init__(self, joint):
        self.joint, self.context, self.blank = joint, joint.context, joint.blank
        self.states, self.answers = [], []

    def predict(self, tokens):
        return self.joint.predict(tokens)

    def join(self, encoded, predicted):
        found = self.joint.join(encoded, predicted)
        self.states.append(encoded[0])
        self.answers.append(found[0])
        return found


def test_the_path_of_a_search_asks_what_the_search_asked():
    recorder, [states] = Recorder(Joint(blank=6.0)), drawn(0, 60)
    [spans] = TransducerSearch(recorder).feed([states])
    path = SearchPath.of(spans, len(states), recorder)
    assert np.bincount(path.frames).max() in range(3, MAX_TOKENS_PER_FRAME), "some frames have several tokens"
    np.testing.assert_array_equal(states[path.frames], recorder.states)
    np.testing.assert_allclose(path.scores(recorder.joint, states), recorder.answers, atol=1e-6)


@pytest.mark.parametrize("theirs, excused", [
    ([[0.0, -1.0], [-1.0, -1.00001]], False),  # the same tokens: other words would have another cause
    ([[0.0, -1.0], [-1.00001, -1.0]], True), ([[-1.0, 0.0], [-1.00001, -1.0]], False)])
def test_other_words_are_excused_where_the_search_parts_at_a_tie_alone(theirs, excused):
    mine = np.array([[0.0, -1.0], [-1.0, -1.00001]], np.float32)
    assert SearchMeasure().is_tied((None, mine), (None, np.array(theirs, np.float32))) == excused


def export_of(run, *words):
    to = run.with_name(f"{run.name}-bundle")
    assert main(["export", str(run), "--to", str(to), "--clips", "3", "--formats", "onnx", *words]) == 0
    return to


@pytest.fixture(scope="module")
def whole(made):
    """A run that learnt whole recordings alone; its graph for streams is one more to export, which takes long."""
    return made("whole", chunks=None)


@pytest.fixture(scope="module")
def bundle(whole):
    return export_of(whole)


@pytest.fixture(scope="module")
def live(run):
    return export_of(run, *["--target", "sherpa"] * sherpa_hears_streams())


@pytest.mark.slow
def test_all_three_graphs_are_compared_and_the_bundle_is_used(bundle):
    facts = json.loads((bundle / "parity.json").read_text())
    assert facts["formats"]["onnx"]["difference"] < 1e-3 and facts["formats"]["onnx"]["words_changed"] == 0
    assert {"model.onnx", "decoder.onnx", "joiner.onnx", "tokens.txt"} <= {path.name for path in bundle.iterdir()}
    page = (bundle / "README.md").read_text()
    code = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    search = next(part for part in code if "def text(states)" in part)
    names = {}
    exec(search.replace('("decoder.onnx", "joiner.onnx")', repr(tuple(str(bundle / name) for name in (
        "decoder.onnx", "joiner.onnx")))).replace('"tokens.txt"', repr(str(bundle / "tokens.txt"))), names)
    with load(bundle, device="cpu") as model:
        signal = np.random.default_rng(0).normal(scale=0.1, size=32_000).astype(np.float32)
        whole = model.transcribe(signal)
        assert whole.duration == 2.0 and model.engine.config.kind == "transducer"
        [states] = model.engine.run([signal])
        assert names["text"](states) == whole.text != ""


@pytest.mark.slow
@pytest.mark.long
def test_so_is_the_graph_for_streams(live):
    """As of CTC, whose graph of the same encoder tasks/recognise/test_streams.py has."""
    assert set(json.loads((live / "parity.json").read_text())["stream"]) == {"320 ms", "640 ms", "1280 ms"}
    assert (live / "stream.onnx").exists()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not sherpa_hears_streams(), reason="sherpa-onnx is missing, or computes other features for streams")
def test_sherpa_hears_the_words_of_the_checkpoint_and_the_readme_says_how(live, tmp_path, capsys, monkeypatch):
    parity = json.loads((live / "parity.json").read_text())["sherpa stream"]
    assert list(parity) == ["640 ms"] and parity["640 ms"]["sherpa"]["words_changed"] == 0
    listed = json.loads((live / layout.CONFIG).read_text())["files"]
    assert {"stream.sherpa.onnx", "decoder.sherpa.onnx", "joiner.sherpa.onnx", "tokens.sherpa.txt"} <= set(listed)
    [code] = [part.split("```")[0] for part in (live / "README.md").read_text().split("```python\n")[1:]
              if "import sherpa_onnx" in part or "sherpa_onnx," in part]
    made = shutil.copytree(live, tmp_path / "bundle")
    monkeypatch.chdir(made)
    signal = (np.sin(np.arange(40_007) * 0.1) * 0.2 + 0.02 * np.random.default_rng(0).standard_normal(40_007))
    soundfile.write("clip.wav", signal.astype(np.float32), 16_000, subtype="FLOAT")
    capsys.readouterr()
    exec(code, {})
    transcript = "".join(capsys.readouterr().out.split())
    with load(live, device="cpu") as model:
        stream = model.stream(chunk=640)
        ours = stream.feed(np.pad(signal, (0, 10_240)).astype(np.float32)) + stream.finish()
    ours = "".join(word.text for each in ours for word in each.settled)
    assert transcript and ours.startswith(transcript), "which only takes whole chunks"


@pytest.mark.slow
def test_a_test_is_searched_with_a_tuned_language_model_whole_and_in_chunks(run, tmp_path, capsys):
    lm.build(Manifest.read(run / "manifests" / "train.csv").texts, tmp_path / "words.arpa", order=2)
    evaluate = ["evaluate", str(run), "--device", "cpu", "--workers", "0", "--beam", "4"]
    assert main([*evaluate, "--lm", str(tmp_path / "words.arpa"), "--tune-lm", "--nbest", "2"]) == 0
    folder = run / "evaluations" / "test-best-words-tuned-beam4-nbest2"
    facts = json.loads((folder / "result.json").read_text())
    assert facts["decoder"]["beam"] == 4 and facts["decoder"]["dev_WER"] <= facts["decoder"]["dev_WER_greedy"]
    listed = [json.loads(line) for line in (folder / "nbest.jsonl").read_text().splitlines()]
    assert len(listed) == 3 and all(each["hypotheses"][0]["acoustic"] < 0 for each in listed)
    assert main([*evaluate, "--chunk", "640,whole", "--hot-word", "the=3"]) == 0
    chunks = json.loads((run / "evaluations" / "test-best-hot-chunk640-whole-beam4" / "result.json").read_text())
    assert [each["chunk"] for each in chunks["chunks"]] == [640, "whole"]
    capsys.readouterr()
    assert main([*evaluate, "--joint"]) == 2
    assert "a transducer has no attention decoder, so it can't use --joint" in capsys.readouterr().err


@pytest.mark.slow
def test_a_joint_network_that_was_written_wrongly_is_not_published(whole, bundle, tmp_path, capsys, monkeypatch):
    put_for_traces(bundle, monkeypatch)
    monkeypatch.setattr(exported.Joiner, "forward",
                        lambda self, encoded, predicted: self.head.join(encoded, 1.01 * predicted))
    assert main(["export", str(whole), "--to", str(tmp_path / "bundle"), "--clips", "3", "--formats", "onnx"]) == 2
    told = capsys.readouterr().err
    assert "does not match the checkpoint" in told and "log_probs, frame" in told
    assert not (tmp_path / "bundle").exists()

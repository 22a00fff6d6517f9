"""From a run to a bundle: all formats agree or nothing is published; stock clients run what is."""

import copy
import errno
import functools
import importlib.util
import json
import os
import pickle
import pickletools
import re
import shutil
import sys
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import graph_bundles
import numpy as np
import onnx
import pytest
import run_folders
import soundfile
import torch
from refusals import refused
from safetensors.torch import load_file

import sbkit.infer
from sbkit.cli import main
from sbkit.data.audio import read_audio
from sbkit.data.manifest import Manifest
from sbkit.decode.beam import BeamSearch
from sbkit.errors import SbkitError
from sbkit.export import exported, graph, layout, source
from sbkit.export.bundle import ExportRequest, export
from sbkit.export.layout import Config
from sbkit.export.runners import on_waveforms, open_runner
from sbkit.infer.bundles import BundleLoader
from sbkit.runs import restore
from sbkit.score.weights import ChosenWeights, Mean
from sbkit.tasks.ctc import CTC, sherpa
from sbkit.tasks.recognise import exported as recogniser
from sbkit.tasks.recognise.graph import OUTPUTS, reference
from sbkit.tasks.task import Task

pytestmark = pytest.mark.slow  # each export takes some seconds
HAS_SHERPA = importlib.util.find_spec("sherpa_onnx") is not None
needs_sherpa = pytest.mark.skipif(not HAS_SHERPA, reason="sherpa-onnx is not installed")


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    """A model is traced once, and turned into ONNX once for the same weights: tests differ in what becomes of it.

    Other weights are put into what was traced, which the comparison with the checkpoint would tell if it were wrong.
    """
    traced, turned, trace, to_onnx = {}, {}, recogniser.trace, graph.to_onnx

    def traced_before(made):
        values = dict((*made.named_parameters(), *made.named_buffers()))
        kind = str(made), tuple(values)
        key = kind, tuple((name, value.detach().numpy().tobytes()) for name, value in values.items())
        if key not in traced:
            known = next((program for (other, _), program in traced.items() if other == kind), None)
            traced[key] = trace(made) if known is None else filled(known, values)
        return traced[key]

    def filled(program, values):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about a class that it copies
            other = copy.deepcopy(program)
        other.state_dict.update({name: values[name] for name in other.state_dict})
        return other

    def turned_before(program, inputs, outputs):
        if id(program) not in turned:
            turned[id(program)] = program, to_onnx(program, inputs, outputs)
        return copy.deepcopy(turned[id(program)][1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recogniser, "trace", traced_before)
        patch.setattr(graph, "to_onnx", turned_before)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    home = tmp_path_factory.mktemp("export")
    data = run_folders.corpus(home / "data", train=12, dev=3, test=5)
    for path in (data / "wavs").iterdir():  # as in speech, there is silence around and between
        signal, rate = soundfile.read(path)
        signal[:1500], signal[5000:7000], signal[-1500:] = 0.0, 0.0, 0.0
        soundfile.write(path, signal, rate)
    folder = run_folders.run_with_model(home / "run", data, normalize={"norm_type": "sentence"})  # for sherpa-onnx
    _sharpen(folder)
    return folder


def _sharpen(folder):
    """Weights as drawn say nearly the same of every frame; larger ones make words that could go wrong."""
    for path in folder.glob("save/CKPT+*/model.ckpt"):
        state = torch.load(path, weights_only=True)
        torch.manual_seed(0)
        for name in list(state):
            if name.startswith("3.") and name.endswith("weight"):  # ctc_lin
                state[name] = torch.randn_like(state[name]) * 2
        torch.save(state, path)
    for path in folder.glob("save/CKPT+*/CKPT.sums.json"):
        path.unlink()


@pytest.fixture(scope="module")
def made(run, tmp_path_factory):
    """The bundle of the best checkpoint in all formats, with the model that sherpa-onnx runs where it is installed."""
    to = tmp_path_factory.mktemp("made") / "bundle"
    request = ExportRequest(run, to, clips=5, target=layout.SHERPA if HAS_SHERPA else None)
    assert export(request, BundleLoader()) == 0
    return to


@pytest.fixture(scope="module")
def clips(run):
    return [read_audio(wav) for wav in Manifest.read(run / "manifests" / "test.csv").wavs]


def test_the_bundle_is_whole(made, run):
    names = {path.name for path in made.iterdir()}
    assert names == {
        "config.json", "model.safetensors", "model.ckpt", "tokenizer.model", "tokenizer.ckpt", "tokens.txt",
        "model.onnx", "model.int8.onnx", "model.pt2", "hyperparams.yaml", "parity.json", "README.md",
        *["model.sherpa.onnx"] * HAS_SHERPA}
    assert not [path for path in made.parent.iterdir() if path != made], "nothing is left beside it"
    for one, other in (("model.safetensors", "model.ckpt"), ("tokenizer.model", "tokenizer.ckpt")):
        assert (made / one).samefile(made / other), "one file under two names"
    config = Config.read(made)
    for name, known in config.files.items():
        assert layout.fingerprint(made / name) == known
    assert set(config.files) == names - {"config.json"}
    assert config.trained["checkpoint"] == "CKPT+epoch2" and config.trained["valid"]["WER"] == 40.0
    assert (config.sample_rate, config.hop_samples, config.subsampling) == (16000, 160, 4)
    assert (made / config.trained["run"]).samefile(run), "improve finds it there"
    assert str(made.parent) not in (made / "config.json").read_text(), "no path of this machine goes with it"


def contents(path):
    """The bytes of a file, or of each file in an archive."""
    if not zipfile.is_zipfile(path):
        return [path.read_bytes()]
    assert path.name == "model.pt2"
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in archive.namelist()]


def test_nothing_in_it_is_a_pickle(made):
    def is_pickle(data):
        if data[:2] == b"PK":  # torch.save's
            return True
        try:
            return data[:1] == b"\x80" and bool(list(pickletools.genops(data)))
        except ValueError:
            return False

    assert is_pickle(pickle.dumps([1])) and is_pickle(pickle.dumps({"a": np.ones(3)}))
    for path in made.iterdir():
        assert not any(map(is_pickle, contents(path))), path


def test_nothing_in_it_tells_where_it_was_made(made):
    """Exporters write the file and line of every operation into a graph, and source lines of one's own code."""
    places = [str(Path(sbkit.__file__).parent).encode(), str(Path(torch.__file__).parent).encode(), b"stack_trace"]
    for path in made.iterdir():
        assert not any(place in data for place in places for data in contents(path)), path


def test_its_readme_says_what_was_trained_and_which_files_can_run_code(made):
    readme = (made / "README.md").read_text()
    assert f"\n# {Config.read(made).trained['experiment']}\n" in readme and "\n# bundle" not in readme
    for part, told in (("PyTorch", "`.pt2` file is a program"), ("SpeechBrain", "calls what `hyperparams.yaml`")):
        assert told in readme.split(f"### {part}")[1].split("###")[0]


def test_its_readme_says_what_it_writes_where_nobody_speaks(made):
    """By the bundle's own model; the files' fingerprints are right all the same."""
    readme, config = (made / "README.md").read_text(), json.loads((made / "config.json").read_text())
    words = config["trained"]["behaviour"]["behaviour.silence"]
    assert "## Hallucinated words per minute on non-speech" in readme
    assert re.search(rf"\| all \|.*\| {words:.1f} \|", readme)
    assert re.search(r"\| as recorded \| [\d.]+ \| – \| █* \|", readme)
    assert config["files"]["README.md"] == layout.fingerprint(made / "README.md")


def test_a_model_whose_batches_leak_runs_one_at_a_time(made, run, tmp_path, monkeypatch, caplog):
    _spoil(monkeypatch, made, lambda found: [each + 0.1 * (len(found) > 1) for each in found])
    assert export(ExportRequest(run, tmp_path / "b", formats=["torch"], clips=3)) == 0
    assert Config.read(tmp_path / "b").batching is False and "one utterance at a time" in (
        tmp_path / "b" / "README.md").read_text()
    assert "runs each utterance alone" in caplog.text


def test_parity_is_written_down_and_shown(made, run, tmp_path, capsys):
    facts = json.loads((made / "parity.json").read_text())
    assert [name for name in facts["formats"] if not name.startswith("sherpa")] == [
        "checkpoint", "onnx", "int8", "torch", "speechbrain"]
    for name in ("onnx", "torch", "speechbrain"):
        each = facts["formats"][name]
        assert each["difference"] <= 1e-3 and each["words_changed"] == 0 and each["rtf"] > 0 and each["bytes"] > 1000
        assert each["wer"] == facts["formats"]["checkpoint"]["wer"]
    assert facts["formats"]["onnx"]["batch_difference"] <= 1e-3
    clips = facts["clips"]
    assert clips["shortest"] <= 0.05 and clips["longest"] > clips["longest_in_training"]
    assert export(ExportRequest(run, tmp_path / "b", formats=["onnx"], clips=2)) == 0
    shown = capsys.readouterr().out
    assert "real-time factor" in shown and "checkpoint" in shown and "onnx" in shown and "sbkit transcribe" in shown
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "README.md", "config.json", "model.onnx", "parity.json", "tokens.txt"]


@pytest.mark.parametrize("model", ["onnx", "torch"])
def test_the_engine_says_what_the_checkpoint_says(made, run, clips, model):
    trained = source.open_run(run)
    expected = reference(trained.exported.acoustic_model)
    with sbkit.infer.load(made, model=model, device="cpu") as loaded:
        for signal, found in zip(clips, loaded.engine.run(clips), strict=True):
            np.testing.assert_allclose(found, expected(signal), atol=1e-3)
        for signal in clips:
            log_probs = expected(signal)
            labels = [k for k, before in zip(log_probs.argmax(-1), [0, *log_probs.argmax(-1)][:-1], strict=True)
                      if k != before and k != 0]
            said = trained.keys.tokenizer.decode(labels)
            assert loaded.transcribe(signal).text.split() == said.split()


def test_stock_speechbrain_loads_and_transcribes_it(made, run, clips, tmp_path):
    from speechbrain.inference.ASR import EncoderASR

    model = EncoderASR.from_hparams(source=str(made), savedir=str(tmp_path / "sb"), run_opts={"device": "cpu"})
    wav = Manifest.read(run / "manifests" / "test.csv").wavs[0]
    with sbkit.infer.load(made, device="cpu") as loaded:
        assert model.transcribe_file(wav).split() == loaded.transcribe(wav).text.split()
        assert model.transcribe_file(wav), "the model says something, or the comparison is empty"


# ---------------------------------------------------------------- the gate


def _spoil(monkeypatch, made, spoil):
    """Make torch.export's model answer otherwise than the one in the bundle, which takes seconds to load."""
    right = _right(made)
    opened = exported.open_runner
    monkeypatch.setattr(exported, "open_runner", lambda name, path: None if name == "torch" else opened(name, path))
    monkeypatch.setattr(exported, "on_waveforms", lambda call, *args: on_waveforms(call, *args) if call else
                        lambda signals: spoil(right(signals)))


@functools.cache
def _right(made):
    return on_waveforms(open_runner("torch", made / layout.MODELS["torch"]), OUTPUTS, Config.read(made).min_samples)


@pytest.mark.parametrize("spoil, code, reason", [
    (lambda found: [each + 0.01 for each in found], "parity-failed", r"\n  torch: log-probabilities differ by 0.01"),
    (lambda found: [each[:-1] for each in found], "parity-failed", r"\n  torch: log-probabilities differ by inf"),
    (lambda found: [np.roll(each, 3, axis=1) for each in found], "parity-failed",
     r"\n  torch: (.|\n)*clips have different words"),
    (lambda found: [each * np.nan for each in found], "nan-output", ""),
], ids=["a little", "cut", "other words", "nan"])
def test_a_format_that_does_something_else_keeps_all_from_being_published(
        made, run, tmp_path, monkeypatch, spoil, code, reason):
    _spoil(monkeypatch, made, spoil)
    with refused(code, wording=False) as error:  # which clip differs most depends on rounding
        export(ExportRequest(run, tmp_path / "b", formats=["torch"], clips=2))
    assert re.search(reason, error.value.message)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_leaves_the_old_bundle(made, run, tmp_path, monkeypatch):
    to = tmp_path / "b"
    shutil.copytree(made, to)
    _spoil(monkeypatch, made, lambda found: [each + 1 for each in found])
    with refused("parity-failed", wording=False):
        export(ExportRequest(run, to, formats=["torch"], clips=2, force=True))
    assert {path.name for path in tmp_path.iterdir()} == {"b"}
    assert Config.read(to).models.keys() == Config.read(made).models.keys()


def test_an_encoder_under_its_own_key_goes_into_speechbrains_folder(run, tmp_path):
    """As in a recipe based on one that has a Transformer, whose initial weights are SpeechBrain's."""
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"""recipe: !include:{run_folders.RECIPE}
    Transformer: null
    encoder: !new:torch.nn.Linear
        in_features: !ref <n_mels> // 4 * <cnn_channels>
        out_features: !ref <d_model>
    model: !new:torch.nn.ModuleList [[!ref <CNN>, !ref <encoder>, !ref <seq_lin>, !ref <ctc_lin>]]
    opt_class: {{modules: [!ref <encoder>]}}
    intermediate_ctc: 0
""")
    own = run_folders.run_with_model(tmp_path / "own", Path(Manifest.read(run / "manifests" / "test.csv").wavs[0]
                                                            ).parents[1], recipe=recipe)
    assert export(ExportRequest(own, tmp_path / "b", formats=["speechbrain"], clips=2)) == 0
    assert "!new:torch.nn.Linear" in (tmp_path / "b" / "hyperparams.yaml").read_text()


# ---------------------------------------------------------------- formats that are left out


class Faulty(exported.Exported):
    """A model of two labels, of which some formats can't be run, or say something else."""

    fault, change = (), None

    def runner(self, name, folder, config):
        run = super().runner(name, folder, config)
        if name in self.fault and self.change is None:
            raise ValueError("no such kernel")
        return (lambda signals: [self.change(each) for each in run(signals)]) if name in self.fault else run


def faulty(to, *fault, change=None, formats=None):
    model = Faulty(graph_bundles.Level(), {"level": ("batch",)}, graph_bundles.RATE, labels=["quiet", "loud"])
    model.fault, model.change = fault, change
    model.forward = lambda signal, samples: model.graph(signal[None], torch.tensor([samples]))
    keys = SimpleNamespace(corpus=None, language="")
    return export(ExportRequest(to.parent / "run", to, formats=formats),
                  open_model=lambda: source.Trained(model, keys, {}))


class OtherSearch(BeamSearch):
    """A search of the user's own."""


@pytest.mark.slow
@pytest.mark.parametrize("search_class, warned", [(OtherSearch, True), (BeamSearch, False), (None, False)])
def test_warns_if_an_evaluation_searches_otherwise_than_the_bundle(tmp_path, caplog, search_class, warned):
    model = Faulty(graph_bundles.Level(), {"level": ("batch",)}, graph_bundles.RATE, labels=["quiet", "loud"])
    model.forward = lambda signal, samples: model.graph(signal[None], torch.tensor([samples]))
    trained = source.Trained(model, SimpleNamespace(corpus=None, language=""), {}, search_class)
    request = ExportRequest(tmp_path / "run", tmp_path / "b", formats=["onnx"])
    assert export(request, open_model=lambda: trained) == 0
    assert ("--beam searches with OtherSearch, but the bundle with BeamSearch" in caplog.text) == warned


FAULTS = {
    "int8 that says other words on noise": (
        "int8", np.negative, {"int8": r"label errors 100\.00 % where the checkpoint has 0\.00 %"}),
    "a program that can't be run": ("torch", None, {"torch": "ValueError: no such kernel"}),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_format_that_fails_is_left_out_with_its_reason(tmp_path, capsys, case):
    fault, change, reasons = FAULTS[case]
    to = tmp_path / "b"
    assert faulty(to, fault, change=change) == 0
    config, shown, card = layout.read(to), capsys.readouterr().out, (to / "README.md").read_text()
    assert set(config.models) == {"onnx", "int8", "torch"} - set(reasons) and config.left_out.keys() == reasons.keys()
    for name, reason in config.left_out.items():
        assert re.search(reasons[name], reason)
        assert f"left out: {name}, because {reason}" in shown and f"- {name}: {reason}" in card
        assert not (to / layout.MODELS[name]).exists()
    assert "give sbkit import a --data_folder; a run's corpus has to be where it was" in shown
    assert set(json.loads((to / "parity.json").read_text())["formats"]) == {"checkpoint", *config.models}
    assert set(config.files) == {path.name for path in to.iterdir()} - {"config.json"}
    with sbkit.infer.load(to, model=next(iter(config.models)), device="cpu") as model:
        assert model.run(np.full(900, 0.5, np.float32)).label == "loud"
    with refused("parity-failed" if change else "format-failed"):
        faulty(tmp_path / "named", fault, change=change, formats=[fault])
    assert {path.name for path in tmp_path.iterdir()} == {"b"}, "a format asked for by name refuses the whole"


def test_formats_that_can_run_code_are_published_alone_only_by_name(tmp_path):
    """Such as where ONNX can't be written for a reason of this machine."""
    with refused("only-code-formats"):
        faulty(tmp_path / "b", "onnx", change=lambda found: found + 0.01)
    assert not [*tmp_path.iterdir()]
    assert faulty(tmp_path / "b", "onnx", change=lambda found: found + 0.01, formats=["torch"]) == 0
    assert layout.read(tmp_path / "b").models.keys() == {"torch"}


def test_an_onnxscript_that_cannot_be_used_ends_the_export(tmp_path, monkeypatch):
    from onnxscript.rewriter.rules import common

    monkeypatch.delitem(sys.modules, "sbkit.export.onnx_passes", raising=False)
    monkeypatch.delattr(sbkit.export, "onnx_passes", raising=False)
    monkeypatch.delattr(common, "cast_cast_rule")
    with refused("wrong-version", wording=False):
        faulty(tmp_path / "b")
    assert not [*tmp_path.iterdir()]


def test_where_no_format_passes_nothing_is_published(tmp_path):
    reasons = r"\n  onnx: .* by 0\.01, .* of noise.*\n  torch: .* of noise.*\n  int8: "
    with refused("parity-failed", wording=False) as error:  # which clip differs most depends on rounding
        faulty(tmp_path / "b", "onnx", "torch", change=lambda found: found + 0.01)
    assert re.search(reasons, error.value.message)
    assert not [*tmp_path.iterdir()]


def test_what_cannot_be_written_is_left_out_and_a_full_disk_is_no_format_s_fault(tmp_path, monkeypatch):
    def write(error):
        def raising(program, path):
            path.write_bytes(b"half of it")
            raise error
        monkeypatch.setattr(graph, "write_torch", raising)

    write(RuntimeError("no such operator"))
    assert faulty(tmp_path / "b") == 0
    assert layout.read(tmp_path / "b").left_out == {"torch": "RuntimeError: no such operator"}
    assert not (tmp_path / "b" / "model.pt2").exists()
    def write_folder(program, path):
        (path / "parts").mkdir(parents=True)
        raise RuntimeError(f"bad {Path.home()}, '{tmp_path}/run/a b.py', file://{path} by https://torch.org/docs/x")
    monkeypatch.setattr(graph, "write_torch", write_folder)
    assert faulty(tmp_path / "c") == 0
    assert layout.read(tmp_path / "c").left_out["torch"] == (
        "RuntimeError: bad ~, 'a b.py', file://c/model.pt2 by https://torch.org/docs/x")
    assert not (tmp_path / "c" / "model.pt2").exists()
    shutil.rmtree(tmp_path / "c")
    monkeypatch.setattr(graph, "to_onnx", lambda *a: (_ for _ in ()).throw(SbkitError("format-failed", "no such node")))
    with refused("format-failed", wording=False):  # it names the home folder
        faulty(tmp_path / "none")
    write(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises((OSError, SbkitError), match=r"[Ss]pace"):
        faulty(tmp_path / "full")
    assert {path.name for path in tmp_path.iterdir()} == {"b"}


# ---------------------------------------------------------------- choices


def test_the_last_and_the_mean_of_checkpoints(run, tmp_path):
    assert export(ExportRequest(run, tmp_path / "last", formats=["speechbrain"], weights=ChosenWeights("last"),
                                clips=2)) == 0
    assert Config.read(tmp_path / "last").trained["checkpoint"] == "CKPT+within"
    assert export(ExportRequest(run, tmp_path / "mean", formats=["speechbrain"],
                                weights=ChosenWeights(average=Mean(2)), clips=2)) == 0
    assert Config.read(tmp_path / "mean").trained["mean_of"] == 2
    last, mean = (load_file(tmp_path / name / layout.WEIGHTS) for name in ("last", "mean"))
    assert last.keys() == mean.keys() and any((mean[name] - last[name]).abs().max() > 1e-3 for name in last)


def test_what_is_there_is_replaced_only_when_asked(made, run, tmp_path, capsys):
    assert main(["export", str(run), "--to", str(made), "--formats", "torch"]) == 2
    assert "[output-exists]" in capsys.readouterr().err
    to = tmp_path / "b"
    assert main(["export", str(run), "--to", str(to), "--formats", "speechbrain", "--clips", "2"]) == 0
    assert main(["export", str(run), "--to", str(to), "--formats", "speechbrain", "--clips", "2", "--checkpoint",
                 "last", "--force"]) == 0
    assert Config.read(to).trained["checkpoint"] == "CKPT+within"
    assert {path.name for path in tmp_path.iterdir()} == {"b"}
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    for config in (None, {"model_type": "wav2vec2"}, {"format": layout.FORMAT, "files": {"model.onnx": {}}}):
        if config is not None:  # of another program's model, and of a bundle in which somebody works
            (tmp_path / "thesis" / layout.CONFIG).write_text(json.dumps(config))
        assert main(["export", str(run), "--to", str(tmp_path / "thesis"), "--force"]) == 2
        assert "so it is not replaced" in capsys.readouterr().err
        assert (tmp_path / "thesis" / "chapter").read_text() == "years of work"


def test_the_mark_of_a_bundle_is_written_before_it_is_put_in_place(run, tmp_path, monkeypatch):
    to, mark, seen = tmp_path / "b", tmp_path / "mark.json", []
    rename = os.rename

    def watched(one, other):
        if Path(other) == to:
            seen.append(mark.read_bytes())
        rename(one, other)

    monkeypatch.setattr(os, "rename", watched)
    export(ExportRequest(run, to, formats=["speechbrain"], clips=2, mark=mark))
    assert seen == [mark.read_bytes()] == [(to / layout.CONFIG).read_bytes()]


@pytest.mark.parametrize("words, expected", [
    (["--formats", "onnx,tflite"], "[bad-option]"), (["--checkpoint", "best-of-all"], "no checkpoint 'best-of-all'"),
    (["--clips", "-3"], "[bad-option]"), (["--tolerance", "nan"], "[bad-option]"),
])
def test_mistakes_are_told_before_anything_is_made(run, tmp_path, capsys, words, expected):
    assert main(["export", str(run), "--to", str(tmp_path / "b"), *words]) == 2
    assert expected in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "b")]) == 2
    assert "is not a run" in capsys.readouterr().err


@pytest.mark.parametrize("inside, expected", [("", "is a file; name a folder"), ("b", "cannot write into")])
def test_a_place_that_cannot_be_a_bundle_is_told(run, tmp_path, capsys, inside, expected):
    (tmp_path / "notes").write_text("years of work")
    assert main(["export", str(run), "--to", str(tmp_path / "notes" / inside), "--force"]) == 2
    assert expected in capsys.readouterr().err and (tmp_path / "notes").read_text() == "years of work"


def test_a_run_that_was_moved_without_its_audio_is_compared_on_noise(run, tmp_path, capsys):
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    for path in (moved / "manifests").glob("*.csv"):
        path.write_text(path.read_text().replace("/wavs/", "/gone/"))
    assert export(ExportRequest(moved, tmp_path / "b", formats=["torch"])) == 0
    facts = json.loads((tmp_path / "b" / "parity.json").read_text())
    assert "noise" in facts["clips"]["origin"] and facts["formats"]["torch"]["wer"] is None


def test_global_normalisation_goes_into_speechbrains_folder(run, tmp_path, clips, monkeypatch):
    """Its statistics are no parameters: a fixed batch norm has them. tasks/recognise/test_graph.py has them in ONNX."""
    changed = tmp_path / "run"
    shutil.copytree(run, changed)
    recipe = changed / "hyperparams.yaml"
    recipe.write_text(recipe.read_text().replace("norm_type: sentence", "norm_type: global"))
    take_weights = restore.take_weights

    def with_statistics(brain, *a):
        used, norm = take_weights(brain, *a), brain.keys.normalize
        torch.manual_seed(1)
        norm.count, norm.glob_mean, norm.glob_std = 5, torch.randn(80) * 5 - 20, torch.rand(80) * 9 + 5
        return used

    monkeypatch.setattr(restore, "take_weights", with_statistics)
    assert export(ExportRequest(changed, tmp_path / "b", formats=["speechbrain"], clips=3)) == 0
    with pytest.raises(SbkitError, match=r"equally loud.*, or leave out --target sherpa"):
        export(ExportRequest(changed, tmp_path / "c", formats=["torch"], target="sherpa", clips=3))


@needs_sherpa
def test_one_clip_that_sherpa_onnx_hears_differently_without_a_reason_is_refused(run, made, tmp_path, monkeypatch):
    """How it changes recordings may cost a clip its words; whatever else does, does so for all."""
    import sherpa_onnx

    monkeypatch.setattr(sherpa, "trace_module", lambda *_: made / layout.MODELS["sherpa"])
    monkeypatch.setattr(sherpa, "to_onnx", lambda path, *_: onnx.load(path))
    real = sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc

    class Mishearing:
        def __init__(self, **given):
            self.real = real(**given)

        def create_stream(self):
            made = SimpleNamespace(real=self.real.create_stream(), samples=0)

            def accept_waveform(rate, signal):
                made.samples = len(signal)
                made.real.accept_waveform(rate, signal)

            made.accept_waveform = accept_waveform
            return made

        def decode_stream(self, stream):
            self.real.decode_stream(stream.real)
            more = " wrong" if stream.samples == 800 else ""  # the clip of 50 ms
            stream.result = SimpleNamespace(text=stream.real.result.text + more)

    monkeypatch.setattr(sherpa, "imported", lambda: SimpleNamespace(
        OfflineRecognizer=SimpleNamespace(from_omnilingual_asr_ctc=Mishearing)))
    with refused("parity-failed", wording=False) as error:
        export(ExportRequest(run, tmp_path / "b", formats=["onnx"], target="sherpa", clips=5))
    assert "sherpa, as it changes recordings, sherpa: 1 of 7 clips have different" in error.value.message
    assert not (tmp_path / "b").exists()


@needs_sherpa
def test_sherpa_onnx_loads_it_and_hears_the_same_words(made, clips):
    import sherpa_onnx

    assert json.loads((made / "parity.json").read_text())["formats"]["sherpa"]["words_changed"] <= 1
    client = sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc(
        model=str(made / "model.sherpa.onnx"), tokens=str(made / "tokens.txt"))
    streams = [client.create_stream() for _ in clips]
    for stream, signal in zip(streams, clips, strict=True):
        stream.accept_waveform(16_000, signal)
    client.decode_streams(streams)
    with sbkit.infer.load(made, device="cpu") as model:
        found = model.transcribe(list(clips))
    same = [stream.result.text.split() == each.text.split() for stream, each in zip(streams, found, strict=True)]
    assert sum(same) >= len(same) - 1 and any(each.text for each in found)
    timed = next(i for i, each in enumerate(found) if each.words and same[i])
    result = streams[timed].result
    first = next(time for token, time in zip(result.tokens, result.timestamps, strict=True) if token.strip())
    assert first == pytest.approx(found[timed].words[0].start, abs=0.021), "its times are ours"


def test_a_task_that_says_of_nothing_that_it_is_exported_is_not(run, monkeypatch):
    monkeypatch.setattr(CTC, "exported", Task.exported)
    with refused("nothing-to-export"):
        source.open_run(run)

"""What docs/tutorials/own-task.md and docs/how-to/extend.md say, done in a folder of one's own: a task that this
repository does not know."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import processes
import pytest
import soundfile
from trained_runs import ROOT, TONES, metrics, tone, tones

from sbkit import infer
from sbkit.data.columns import BatchColumns
from sbkit.data.corpus import Corpus
from sbkit.export import layout
from sbkit.recipe import load
from sbkit.rehearsal.corpus import write

PAGE = "".join((ROOT / "docs" / name).read_text(encoding="utf-8")
               for name in ("tutorials/own-task.md", "how-to/extend.md"))


def files(page=PAGE):
    """The files that the page writes out, by name."""
    blocks = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", page, re.S)
    return dict(blocks)


def pairs(folder):
    """Recordings with a hum of each speaker's, and what they were before noise was added."""
    for split, count in (("train", 48), ("dev", 9), ("test", 9)):
        lines = ["ID,duration,wav,spk_id,clean_wav"]
        for i in range(count):
            seconds, drawn = 0.5 + 0.05 * (i % 7), np.random.default_rng(i)
            clean = tone(TONES[i % 3], seconds, 1000 * len(split) + i)
            names = [f"wavs/{split}{i}{kind}.wav" for kind in ("", "-clean")]
            (folder / "wavs").mkdir(parents=True, exist_ok=True)
            soundfile.write(folder / names[0], clean + 0.1 * drawn.standard_normal(len(clean)), 16_000)
            soundfile.write(folder / names[1], clean, 16_000)
            lines.append(f"{split}{i},{seconds},{names[0]},s{i % 3},{names[1]}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")


def spoken_names(home):
    """A folder with lists of the recordings of ``parts``, whose names are what is said in them."""
    folder = home / "spoken"
    folder.mkdir(exist_ok=True)
    for split in ("train", "dev", "test"):
        lines = ["ID,duration,wav,wrd"]
        for path in sorted((home / "recordings").glob(f"{split}-*.wav")):
            lines.append(f"{path.stem.partition(' ')[0]},{soundfile.info(path).duration},{path},"
                         f"{path.stem.partition(' ')[2]}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the page's two files and a corpus."""
    folder = tmp_path_factory.mktemp("mine")
    for name, text in files().items():
        (folder / name).write_text(text)
    tones(folder / "data", 60, 15)
    pairs(folder / "pairs")
    return folder


@pytest.fixture(scope="module")
def parts(home):
    """The same folder with recordings for the recipe of the second half of the page."""
    for name in ("mine.yaml", "focal.yaml"):
        recipe = home / name
        recipe.write_text(recipe.read_text().replace("FLAGSHIP", str(ROOT / "hparams" / "ctc.yaml")))
    for split, count in (("train", 12), ("dev", 3), ("test", 3)):
        for i in range(count):
            path = home / "recordings" / f"{split}-{i} {TONES[i % 3]} {TONES[i % 2]}.wav"
            path.parent.mkdir(exist_ok=True)
            soundfile.write(path, tone(TONES[i % 3], 0.8 + 0.03 * i, i), 16_000)
    return home


TINY = ("--d_model 16 --nhead 2 --num_encoder_layers 1 --num_decoder_layers 1 --d_ffn 16 --cnn_first_channels 4 "
        "--cnn_channels 4 --num_workers 1 --min_steps 0 --step_seconds 4 --number_of_epochs 2 --noprogressbar "
        "--precision fp32 --no-check").split()


def sbkit(home, *words, ranks=1, code=0):
    return processes.sbkit(*words, cwd=home, ranks=ranks, code=code).stdout


@pytest.fixture(scope="module")
def trained(home):
    return home / "results" / "spotter", sbkit(home, "train", "spotter.yaml", "--noprogressbar")


def test_the_page_writes_out_a_file_and_a_yaml():
    assert {"spotter.py", "spotter.yaml"} <= set(files())


@pytest.mark.slow
def test_a_new_folder_for_a_task_of_ones_own_has_it_and_passes_its_check(home, tmp_path):
    said = sbkit(tmp_path, "new", "starter", "--task", "mine")
    own = tmp_path / "starter"
    for name, written in (("spotter.py", "mine.py"), ("spotter.yaml", "hparams/mine.yaml")):
        text = files()[name].replace("Spotter", "Mine").replace("spotter", "mine")
        assert (own / written).read_text() == text, "the page's and the folder's are one"
    assert "sbkit check hparams/mine.yaml" in said
    report = json.loads(sbkit(own, "check", "hparams/mine.yaml", "--json"))
    assert report["errors"] == [] and [each["code"] for each in report["warnings"]] == ["no-such-path"]
    tones(own / "data", 60, 15)
    (own / "lines.py").write_text(
        "from pathlib import Path\nfrom sbkit.train.monitor.loggers import Logger\n\n\nclass Lines(Logger):\n"
        "    def _log(self, values, step, seconds):\n        Path('lines').write_text(str(values))\n\n"
        "    def _close(self):\n        pass\n")
    assert "accuracy" in sbkit(own, "train", "hparams/mine.yaml", "--noprogressbar", "--number_of_epochs", "1",
                               "--loggers", "[lines.Lines]")
    assert "test/test_accuracy" in (own / "lines").read_text()


@pytest.mark.slow
def test_it_is_checked_and_priced(home):
    report = json.loads(sbkit(home, "check", "spotter.yaml", "--json"))
    assert report["errors"] == report["warnings"] == []
    assert report["sections"]["cost"]["values"]["operations_per_second_of_audio"] > 0
    assert report["sections"]["shapes"]["values"]["head"] == [2, 3]
    wrong = sbkit(home, "check", "spotter.yaml", "--width", "24", "--head.in_features", "32", "--json", code=1)
    (error,) = json.loads(wrong)["errors"]
    assert error["code"] == "shape-mismatch" and error["key"].endswith("head.in_features")
    said = processes.sbkit("check", "spotter.yaml", "--num_workers", "three", cwd=home, code=1).stderr
    assert "the text 'three'" in said


@pytest.mark.slow
def test_it_is_trained_tested_and_reported(home, trained):
    folder, out = trained
    assert "accuracy 1" in out and "test_results.json" in out
    assert json.loads((folder / "test_results.json").read_text())["stats"]["accuracy"] == 1
    page = (folder / "report.html").read_text()
    assert "Confusions" in page and "accuracy on dev" in page and "Accuracy" in page
    assert "nothing left to do" in sbkit(home, "train", "spotter.yaml")
    assert "accuracy" in sbkit(home, "evaluate", folder, "--split", "dev")
    assert "report.html" in sbkit(home, "report", folder)


@pytest.mark.slow
def test_it_is_compared_with_another_run_and_says_how_sure_it_is(home, trained):
    short = home / "results" / "short"
    shown = sbkit(home, "train", "spotter.yaml", "--noprogressbar", "--no-check", "--number_of_epochs", "1",
                  "--output_folder", short)
    numbers = json.loads((short / "test_results.json").read_text())
    accuracy, estimate = numbers["stats"]["accuracy"], numbers["estimate"]
    assert accuracy < 1 and re.search(rf"test .*accuracy {accuracy:.4g} \([\d.]+ to [\d.]+\)", shown)
    assert set(estimate["values"]) == {0.0, 1.0} and len(estimate["drawn"]) == 1000
    page = (short / "report.html").read_text()
    assert "Worst recordings" in page and page.count("<audio") == len(estimate["values"])
    gain = 1 - accuracy
    shown = sbkit(home, "report", trained[0], "--against", short, "--utterances", 60)
    assert re.search(rf"(Significantly better: accuracy \+|No significant difference \(accuracy \+){gain:.4g}", shown)
    (page,) = trained[0].glob("report-against-*.html")
    assert f"Better ({round(gain * len(estimate['values']))})" in page.read_text()
    facts = json.loads(next(trained[0].glob("evaluations/*/result.json")).read_text())
    assert facts["accuracy_interval"] == [1.0, 1.0]


def run(bundle, *clips):
    """What a bundle says to recordings, and whether it needed the page's file for that."""
    for kind in ("onnx", "torch"):
        with infer.load(bundle, model=kind) as model:
            print([one.label for one in model.run(list(clips))], "spotter" in sys.modules)


@pytest.mark.slow
def test_it_is_exported_and_runs_without_its_file(home, trained, tmp_path):
    shown = sbkit(home, "export", trained[0], "--to", "bundle", "--clips", 4)
    assert "label errors %" in shown and "its label errors may be" in shown and "WER" not in shown
    assert "int8" in shown and json.loads((home / "bundle" / "parity.json").read_text())["formats"]["onnx"]
    clips = [str(home / "data" / "wavs" / f"test{i}.wav") for i in range(3)]
    done = processes.program(run, str(home / "bundle"), *clips)
    assert done.stdout == 2 * f"{list(TONES)} False\n", done.stderr
    said = processes.sbkit("transcribe", home / "bundle", clips[0], cwd=tmp_path, code=2).stderr
    assert "a speech recogniser is needed here" in said


@pytest.mark.slow
def test_pairs_and_labels_are_checked_and_learnt_from(home):
    speakers = home / "results" / "speakers"
    sbkit(home, "train", "speakers.yaml", "--noprogressbar")
    report = json.loads(sbkit(home, "check", "speakers.yaml", "--json"))
    assert report["errors"] == report["warnings"] == []
    assert json.loads((speakers / "test_results.json").read_text())["stats"]["accuracy"] == 1
    assert "accuracy" in sbkit(home, "evaluate", speakers, "--split", "dev")
    wrong = sbkit(home, "check", "speakers.yaml", "--corpus.columns", "{clean: dry}", "--json", code=1)
    (error,) = json.loads(wrong)["errors"]
    assert error["code"] == "missing-column" and "'dry' among ID, duration, wav, spk_id, clean_wav" in error["message"]


@pytest.mark.parametrize("source", ["pairs", "/nowhere/at/all"])
def test_a_rehearsal_has_pairs_and_labels_with_and_without_their_corpus(home, source, monkeypatch, tmp_path):
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(home)
    path, given = Path("speakers.yaml"), {"data_folder": source, "output_folder": str(tmp_path / "out")}
    recipe = load.open_recipe(path, given)
    words = write(recipe, tmp_path / "data", world=2)["args"]
    assert words[words.index("--batching.clips_per") + 1] == "null"
    made = Corpus(str(tmp_path / "data"), folder=tmp_path / "manifests").prepare(
        show_progress=False, needs_text=False, columns=recipe.task.columns)
    BatchColumns(recipe.task.columns, recipe.keys).check_classes(made["train"])
    assert all(len(each) and Path(each.column("clean")[0]).is_file() for each in made.values())


@pytest.mark.long
@pytest.mark.slow
def test_a_graph_that_computes_something_else_than_the_task_is_not_published(home, trained):
    file, right = home / "spotter.py", files()["spotter.py"]
    wrong = right.replace("self.encoder(signals, lengths)", "self.encoder(0.5 * signals, lengths)")
    assert wrong != right
    file.write_text(wrong)
    try:
        said = processes.sbkit("export", trained[0], "--to", "wrong", "--formats", "onnx", cwd=home, code=2).stderr
    finally:
        file.write_text(right)
    assert re.search(r"onnx: outputs differ by [\d.]+, but only 0.005 is allowed \(.+: .+ where the checkpoint", said)
    assert not (home / "wrong").exists()


@pytest.mark.slow
def test_parts_of_ones_own_are_checked(parts):
    report = json.loads(sbkit(parts, "check", "mine.yaml", *TINY[:-6], "--json"))
    assert report["errors"] == report["warnings"] == []
    assert report["sections"]["shapes"]["values"]["Transformer"][-1] == 16


@pytest.mark.long
@pytest.mark.slow
def test_parts_of_ones_own_are_trained_and_shipped(parts):
    out = sbkit(parts, "train", "mine.yaml", *TINY, "--output_folder", "results/mine")
    assert "test WER" in out
    assert any("sure" in line for line in metrics(parts / "results" / "mine")), "the loss's own part is logged"
    prepared = json.loads((parts / "results" / "mine" / "manifests" / "prepare_report.json").read_text())
    assert prepared["source"]["kind"] == "folder of spoken names" and prepared["splits"]["train"]["kept"] == 12
    checkpoints = [path.read_text() for path in (parts / "results" / "mine" / "save").glob("CKPT+*/CKPT.yaml")]
    assert all("CER:" in text for text in checkpoints if "epoch" in text)
    assert "left out" not in sbkit(
        parts, "export", "results/mine", "--to", "mine", "--formats", "onnx,speechbrain", "--clips", 3)
    config = layout.read(parts / "mine")
    assert {"onnx", "speechbrain"} <= config.models.keys() and config.batching
    sbkit(parts, "transcribe", "mine", next((parts / "recordings").glob("*.wav")))


@pytest.mark.long
@pytest.mark.slow
def test_a_loss_of_ones_own_is_checked_trained_evaluated_by_a_search_and_shipped(parts):
    data = ("--data_folder", spoken_names(parts))
    report = json.loads(sbkit(parts, "check", "focal.yaml", *TINY[:-6], *data, "--json"))
    assert report["errors"] == []
    assert "test WER" in sbkit(parts, "train", "focal.yaml", *TINY, *data, "--output_folder", "results/focal")
    evaluated = sbkit(parts, "evaluate", "results/focal", "--beam", 4, "--device", "cpu")
    assert "WER" in evaluated and list((parts / "results" / "focal" / "evaluations").glob("*beam4*"))
    sbkit(parts, "export", "results/focal", "--to", "focal", "--formats", "onnx", "--clips", 3)
    sbkit(parts, "transcribe", "focal", next((parts / "recordings").glob("*.wav")))


@pytest.mark.long
@pytest.mark.slow
def test_an_encoder_on_waveforms_is_trained_and_exported(parts):
    (parts / "waves.yaml").write_text(
        f"recipe: !include:{ROOT / 'hparams' / 'ctc.yaml'}\n    compute_features: null\n    normalize: null\n"
        "    spec_augment: null\n    CNN: null\n    Transformer: !new:mine.Waves {size: !ref <d_model>}\n"
        "    initial_weights: null\n    intermediate_ctc: 0.0\n    seq_lin: null\n"
        "    model: !new:torch.nn.ModuleList\n        - [!ref <Transformer>, !ref <ctc_lin>]\n"
        "    modules: {model: !ref <model>}\n"
        "    corpus: !new:sbkit.data.corpus.Corpus\n        source: !new:mine.Folder [recordings]\n"
        "        folder: !ref <output_folder>/manifests\n")
    report = json.loads(sbkit(parts, "check", "waves.yaml", "--d_model", "16", "--json"))
    assert report["errors"] == []
    assert report["sections"]["shapes"]["values"]["frames_per_second"] == pytest.approx(50)
    sbkit(parts, "train", "waves.yaml", *TINY, "--output_folder", "results/waves")
    assert "onnx" in sbkit(parts, "export", "results/waves", "--to", "waves", "--formats", "onnx", "--clips", 3)

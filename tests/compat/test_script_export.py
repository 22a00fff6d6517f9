"""Runs of SpeechBrain scripts are exported and scored without a change to the scripts."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import encoders
import numpy as np
import onnxruntime
import pytest
import sentencepiece
import soundfile
from processes import ON_A_CPU, ROOT
from trained_runs import TONES, here, tone

import sbkit.infer
from sbkit.compat.script_run import run_again
from sbkit.data.piece_model import piece_model
from sbkit.errors import SbkitError

pytestmark = [pytest.mark.slow, pytest.mark.long]

SCRIPTS = Path(__file__).parent / "scripts"
LETTERS = ["▁", *"lowhigbt"]


def sentences(folder, train=16, rest=6):
    """A corpus of sentences of one to three tones."""
    (folder / "wavs").mkdir(parents=True)
    for split, count in (("train", train), ("dev", rest), ("test", rest)):
        lines = ["ID,duration,wav,spk_id,wrd"]
        for number in range(count):
            words = [TONES[(number + place) % 3] for place in range(1 + number % 3)]
            signal = np.concatenate([tone(word, 0.5 + 0.03 * number, 100 * len(split) + number) for word in words])
            path = folder / "wavs" / f"{split}{number}.wav"
            soundfile.write(path, signal, 16_000)
            lines.append(f"{split}{number},{len(signal) / 16_000},{path},s{number % 2},{' '.join(words)}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")


def train(home, name, *words, text=None, code=0):
    """Train by a script as its user does, in its folder."""
    shutil.copy(SCRIPTS / f"{name}.yaml", home / "train.yaml")
    (home / "train.py").write_text((SCRIPTS / f"{name}.py").read_text() if text is None else text)
    environment = {**ON_A_CPU, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(home)}
    done = subprocess.run([sys.executable, "train.py", "train.yaml", "--noprogressbar", *words], cwd=home,
                          env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr[-4000:]
    return home / "results" / name


def files_of(folder):
    """All files with their contents, to see what a command changes."""
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def script_outputs(run, signals):
    """What the script's own compute_forward gives for waveforms alone, as [T, V]: by its Brain, without sbkit's export.
    """
    import torch
    from speechbrain.core import Stage
    from speechbrain.dataio.batch import PaddedData

    outputs = []

    def take_over(reached):
        brain = reached.brain
        batch = next(iter(reached.loader))
        for root in brain.layer_roots:
            root.eval()
        for signal in signals:
            one = type("Batch", (), {"to": lambda self, device: self})()
            for key in batch._PaddedBatch__keys:
                value = getattr(batch, key)
                setattr(one, key, PaddedData(value.data[:1], value.lengths[:1]) if isinstance(value, PaddedData)
                        else value[:1])
            one.sig = PaddedData(torch.from_numpy(signal)[None], torch.ones(1))
            with torch.no_grad():
                outputs.append(brain.compute_forward(one, Stage.TEST)[0][0].numpy())

    run_again(run, take_over)
    return outputs


def test_clips(home):
    """The recordings of the test set."""
    return [soundfile.read(path, dtype="float32")[0] for path in sorted((home / "data/wavs").glob("test*.wav"))]


test_clips.__test__ = False


def check_bundle(home, run, bundle, *, atol=1e-3):
    """The bundle in ONNX Runtime gives what the script gives, of its test set's recordings."""
    signals = test_clips(home)
    session = onnxruntime.InferenceSession(bundle / "model.onnx")
    heard = set()
    for signal, expected in zip(signals, script_outputs(run, signals), strict=True):
        found, (frames,) = session.run(None, {"signals": signal[None], "lengths": np.array([len(signal)])})
        assert frames == len(expected)
        np.testing.assert_allclose(found[0, :frames], expected, atol=atol)
        heard |= set(expected.argmax(-1).tolist())
    facts = json.loads((bundle / "parity.json").read_text())["formats"]
    assert facts["onnx"]["words_changed"] == 0 and "int8" in (bundle / "config.json").read_text()
    return heard


@pytest.fixture
def home(tmp_path):
    sentences(tmp_path / "data")
    return tmp_path


def test_a_recogniser_of_pieces_is_exported_and_scored(home):
    run = train(home, "pieces", "--number_of_epochs=12")
    before = files_of(run)
    said = here("export", run, "--to", home / "bundle")
    assert files_of(run) == before, "an export writes nothing into the run, and trains nothing"
    assert "6 utterances of the script's test set" in said
    assert len(check_bundle(home, run, home / "bundle")) > 3, "it says something"

    said = here("evaluate", run)
    after = {path: content for path, content in files_of(run).items() if path.parts[0] != "evaluations"}
    assert after == before, "an evaluation writes its results, and nothing else"
    result = json.loads((run / "evaluations/test-best/result.json").read_text())
    assert result["references"] == "the column wrd" and "references: the column wrd" in said
    assert result["utterances"] == 6 and (run / "evaluations/test-best/report.html").is_file()
    # The script's own test: SpeechBrain's greedy decoding and its WER.
    own, *_ = re.findall(r"%WER ([\d.]+)", (run / "wer_test.txt").read_text())
    assert result["WER"] == pytest.approx(float(own), abs=0.01)
    assert here("evaluate", run, "--max-wer", "0.01", code=1 if result["WER"] > 0.01 else 0)

    # The words of the bundle are those that SentencePiece writes of the script's best tokens.
    model = sbkit.infer.load(home / "bundle")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(run / "save/12_char.model"))
    signals = test_clips(home)
    for signal, outputs in zip(signals, script_outputs(run, signals), strict=True):
        best = [token for token, _ in itertools.groupby(outputs.argmax(-1).tolist()) if token]
        assert model.transcribe(signal).text.split() == processor.decode(best).split()
    said = here("info", run)
    assert "a run of a script" in said and "python train.py train.yaml --noprogressbar --number_of_epochs=12" in said


def test_a_recogniser_of_labels_is_exported_and_scored(home):
    run = train(home, "phonemes", "--number_of_epochs=6")
    here("export", run, "--to", home / "bundle", "--clips", "4")
    check_bundle(home, run, home / "bundle")
    tokens = (home / "bundle/tokens.txt").read_text()
    assert "▁low " in tokens and "<blk> 0" in tokens, "each label is a word"
    here("evaluate", run)
    rows = [json.loads(line) for line in (run / "evaluations/test-best/utterances.jsonl").open()]
    assert {row["reference"] for row in rows} >= {"low", "high both"}
    assert {word for row in rows for word in row["hypothesis"].split()} <= set(TONES)


def test_ctc_beside_an_attention_decoder_is_exported(home):
    (home / "tokenizer.model").write_bytes(piece_model(["<unk>", "<s>", "</s>", *LETTERS], silent={1, 2}))
    run = train(home, "joint", "--number_of_epochs=3")
    before = files_of(run)
    here("export", run, "--to", home / "bundle", "--clips", "4")
    assert files_of(run) == before
    check_bundle(home, run, home / "bundle")
    weights = onnxruntime.InferenceSession(home / "bundle/model.onnx")
    assert [one.name for one in weights.get_outputs()] == ["log_probs", "frames"]
    names = (home / "bundle/model.onnx").read_bytes()
    assert b"ctc_lin" in names and b"decoder" not in names and b"seq_lin" not in names, "it has no decoder's weights"
    here("evaluate", run)
    assert json.loads((run / "evaluations/test-best/result.json").read_text())["references"] == "the column wrd"


def test_a_pretrained_encoder_within_a_script_is_exported(home):
    encoders.make(home / "encoder", normalizes=True)
    run = train(home, "waves")
    here("export", run, "--to", home / "bundle", "--clips", "4")
    check_bundle(home, run, home / "bundle")
    tokens = (home / "bundle/tokens.txt").read_text()
    assert "▁ " in tokens and "<blk> 0" in tokens, "the label for a space begins a word"
    here("evaluate", run, "--name", "mine")
    assert (run / "evaluations/mine-best/result.json").is_file()


DECLARED = "sbkit_export: {output: outer, tokenizer: !ref <letters>}\n"


def test_what_cant_be_told_is_declared_in_one_line_which_stock_speechbrain_ignores(home):
    """Two heads may be meant. The script never tests, writes spaces as underscores and computes with torch alone."""
    run = train(home, "heads", "--number_of_epochs=8")
    with pytest.raises(SbkitError) as caught:
        export(run, home / "bundle")
    assert caught.value.code == "script-ambiguous" and "sbkit_export: {output: " in caught.value.hint
    assert not (home / "bundle").exists()

    recipe = home / "train.yaml"
    recipe.write_text(recipe.read_text() + DECLARED)
    here("export", run, "--to", home / "bundle", "--clips", "4")
    assert "▁ " in (home / "bundle/tokens.txt").read_text()
    here("evaluate", run)
    rows = [json.loads(line) for line in (run / "evaluations/valid-best/utterances.jsonl").open()]
    assert {row["reference"] for row in rows} >= {"low", "high both"}

    stock = (home / "train.py").read_text().replace("import sbkit as sb", "import speechbrain as sb")
    assert "sbkit" not in stock
    (home / "stock.py").write_text(stock)
    done = subprocess.run([sys.executable, "stock.py", "train.yaml", "--output_folder=results/stock", "--device=cpu"],
                          cwd=home, env={**ON_A_CPU, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list((home / "results/stock/save").glob("CKPT*"))


def export(run, bundle):
    """Export as the command does, without its words."""
    from sbkit.export.bundle import ExportRequest
    from sbkit.tasks.ctc.script import export_run

    return export_run(ExportRequest(run, bundle, clips=4))


def test_a_script_exports_what_it_has_trained(home):
    text = (SCRIPTS / "phonemes.py").read_text() + "    sb.export(asr_brain, to='bundle', clips=4, formats=['onnx'])\n"
    run = train(home, "phonemes", text=text)
    config = json.loads((home / "bundle/config.json").read_text())
    assert config["trained"]["script"] == "train.py" and list(config["models"]) == ["onnx"]
    here("export", run, "--to", home / "again", "--clips", "4", "--formats", "onnx")
    assert (home / "again/model.onnx").read_bytes() == (home / "bundle/model.onnx").read_bytes()


@pytest.mark.parametrize(("change", "code"), [
    (lambda home, run: (run / "script.json").unlink(), "script-not-recorded"),
    (lambda home, run: (run / "script.json").write_text("{"), "script-record-damaged"),
    (lambda home, run: (home / "train.py").unlink(), "script-gone"),
    (lambda home, run: (home / "data/test.csv").unlink(), "script-fails-again"),
    (lambda home, run: edit(home / "train.py", "    asr_brain.fit(", "    sys.exit(3)\n    asr_brain.fit("),
     "script-fails-again"),
    (lambda home, run: edit(home / "train.yaml", "results/pieces", "results/other"), "script-other-run"),
    (lambda home, run: [shutil.rmtree(path) for path in (run / "save").glob("CKPT*")], "script-without-checkpoints"),
    (lambda home, run: edit(home / "train.py", "    asr_brain.tokenizer = tokenizer", "    del tokenizer"),
     "script-tokenizer"),
    (lambda home, run: edit(home / "train.py", "return p_ctc, wav_lens, p_tokens", "return x.mean(1), wav_lens, None"),
     "script-not-ctc"),
    (lambda home, run: edit(home / "train.py", "return p_ctc, wav_lens", "return logits, wav_lens"), "script-output"),
    (lambda home, run: edit(home / "train.py", "return p_ctc, wav_lens", "return p_ctc[:, :, None].expand(-1, -1, 3, "
                            "-1), wav_lens"), "script-not-ctc"),
    (lambda home, run: edit(home / "train.yaml", "sample_rate: 16000", "sample_rate: 8000", "sample_rate: !ref "
                            "<sample_rate>", "sample_rate: 16000"), "script-sample-rate"),
    (lambda home, run: edit(home / "train.yaml", "blank_index: 0", "blank_index: 3", "blank_index: !ref <blank_index>",
                            "blank_index: 0"), "script-blank"),
    (lambda home, run: edit(home / "train.yaml", "seed: 1", "seed: 1\nsbkit_export: {outputs: 0}"),
     "script-declaration"),
    (lambda home, run: edit(home / "train.py", "    asr_brain.fit(", "    torch.ones(1, requires_grad=True).sum()"
                            ".backward()\n    asr_brain.fit("), "script-trains-itself"),
])
def test_what_is_missing_or_unclear_is_named(trained_pieces, change, code):
    home, run = trained_pieces
    change(home, run)
    before = files_of(run)
    with pytest.raises(SbkitError) as caught:
        export(run, home / "bundle")
    assert caught.value.code == code, caught.value
    assert files_of(run) == before and not (home / "bundle").exists()


def edit(path, *changes):
    """Replace texts in a file, in pairs."""
    text = path.read_text()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


@pytest.fixture(scope="module")
def once_trained(tmp_path_factory):
    """A run of pieces, trained once."""
    home = tmp_path_factory.mktemp("pieces")
    sentences(home / "data")
    return home, train(home, "pieces", "--number_of_epochs=1")


@pytest.fixture
def trained_pieces(once_trained):
    """The same run for each test, in the same place, since the record names it."""
    home, run = once_trained
    kept = home.with_name(f"{home.name}-kept")
    if not kept.exists():
        shutil.copytree(home, kept)
    shutil.rmtree(home)
    shutil.copytree(kept, home)
    return home, run


def test_options_that_need_a_task_are_refused(trained_pieces):
    home, run = trained_pieces
    assert "--beam has no effect" in here("evaluate", run, "--beam", "4", code=2)
    assert "--data-folder has no effect" in here("evaluate", run, "--data", home / "data", code=2)
    assert "leave out --average" in here("export", run, "--to", run / "bundle", "--average", "2", code=2)
    assert not (run / "evaluations").exists()

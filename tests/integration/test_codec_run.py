"""A codec from a corpus without texts: trained, resumed, scored, and heard in its report; and its
bundle, with which a corpus becomes codes and codes become sound.
"""

import base64
import copy
import functools
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import processes
import pytest
import soundfile
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file
from trained_runs import copied, different, go_on, here, metrics, outcome, voice, voices

import sbkit.infer
from sbkit.cli import main
from sbkit.codes import Books, Codes
from sbkit.data.audio import read_audio
from sbkit.export import source
from sbkit.export.layout import CodecConfig as Config
from sbkit.system import disk
from sbkit.tasks.codec.exported import OTHER_CODES, fingerprint

pytestmark = pytest.mark.slow

TINY = ("--n_mels 20 --size 16 --hidden 24 --encoder_layers 1 --slow_layers 1 --fast_layers 1 --sizes [256,512] "
        "--crop_seconds 0.5 --step_seconds 4 --min_steps 0 --max_batch_seconds 8 --number_of_epochs 2 "
        "--num_workers 1 --precision fp32 --noprogressbar --no-check --ckpt_interval_minutes 0 "
        "--ckpt_interval_steps 2 --adversarial_from 5 --discriminators.channels 4 --discriminators.sizes [256]").split()
MEASURED = "valid_mel_distance", "test_perplexity"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return voices(tmp_path_factory.mktemp("data"))


def words(out, data, *more):
    return "train", "hparams/codec.yaml", *TINY, "--data_folder", data, "--output_folder", out, *more


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    with copied(out, 6, out.parent / "killed"):
        said = here(*words(out, data))
    assert "48    48" in re.sub(r" +", "    ", said), "no row is left out for want of a text"
    return out


def test_it_learns_from_recordings_without_texts(run):
    epochs = metrics(run, "epoch")
    first, last = (line["valid_loss"] for line in epochs if "valid_loss" in line)
    assert last < first
    assert epochs[-1]["step"] > 5, "the discriminators had their turn"


def test_started_again_it_ends_as_if_it_had_never_been_stopped(run, data):
    out = run.parent / "killed"
    go_on(out, *words(out, data))
    assert different(outcome(out, *MEASURED), outcome(run, *MEASURED)) == []


def test_the_report_lets_one_hear_recordings_and_what_became_of_them(run):
    page = (run / "report.html").read_text()
    assert "The codebooks" in page and "How it sounds" in page
    section = page[page.index('id="listen"'):page.index("</section>", page.index('id="listen"'))]
    sounds = [base64.b64decode(each) for each in re.findall(r'src="data:audio/mpeg;base64,([^"]+)"', section)]
    assert len(sounds) == 20 and section.count("recording") >= 10, "ten clips, two of each"
    before, after = (read_audio(each) for each in sounds[:2])
    assert abs(len(before) - len(after)) < 0.1 * 16_000


def test_it_is_scored_again_and_its_numbers_are_the_tests(run):
    said = processes.sbkit("evaluate", run, "--device", "cpu", "--workers", "0")
    assert "mel distance" in said.stdout
    facts = json.loads((run / "evaluations" / "test-best" / "result.json").read_text())
    tested = json.loads((run / "test_results.json").read_text())["stats"]
    assert facts["mel_distance"] == pytest.approx(tested["mel_distance"], rel=1e-4)
    assert facts["bit_rate"] == pytest.approx(996.58, abs=0.01)
    assert 0 < facts["coding_real_time_factor"] < facts["real_time_factor"]
    assert [book["entries"] for book in facts["codebooks"]] == [1000, 1000]
    assert (run / "evaluations" / "test-best" / "report.html").is_file()


# ---------------------------------------------------------------- the bundle


@pytest.fixture(scope="module")
def bundle(run):
    folder = run.parent / "bundle"
    said = processes.sbkit("export", run, "--to", folder, "--clips", 3)
    assert f"use it: sbkit tokenize {folder} CORPUS" in said.stdout and "WER" not in said.stdout
    return folder


@pytest.fixture(scope="module")
def coder(run):
    return source.open_run(run).exported.coder


@pytest.fixture(scope="module")
def tokens(bundle, data):
    """The test split as codes."""
    folder = bundle.parent / "codes"
    said = processes.sbkit("tokenize", bundle, data, "--split", "test", "--to", folder)
    assert re.search(r"test: 12 utterances, [\d.]+ s, [\d,]+ frames at 997 bit/s", said.stdout)
    return folder / "test"


def checkpoints(coder, signal):
    with torch.no_grad():
        codes, frames = coder.encode(torch.from_numpy(signal)[None], torch.tensor([len(signal)]))
        return codes[0].numpy(), coder.decode(codes, frames)[0].numpy()


@pytest.mark.parametrize("model", ["onnx", "torch"])
def test_its_bundle_gives_the_checkpoints_codes_and_sound_alone_in_batches_and_in_pieces(bundle, coder, model,
                                                                                        monkeypatch):
    signals = [voice(seconds, i) for i, seconds in enumerate((0.01, 1.0, 3.7, 0.5, 2.2))]
    own = [checkpoints(coder, signal) for signal in signals]
    with sbkit.infer.load(bundle, model=model, device="cpu") as codec:
        monkeypatch.setattr("sbkit.infer.codec.PIECE_SECONDS", 1.0)
        found = codec.encode(signals)
        alike = [mine == theirs for mine, (theirs, _) in zip(found, own, strict=True)]
        assert np.mean(np.concatenate(alike)) >= 1 - OTHER_CODES
        for sound, (_, wanted) in zip(codec.decode([codes for codes, _ in own]), own, strict=True):
            np.testing.assert_allclose(sound, wanted.clip(-1, 1), atol=1e-3)
        for signal, codes in zip(signals, found, strict=True):
            assert np.mean(codec.encode([signal])[0] == codes) >= 1 - OTHER_CODES


def test_its_hash_is_the_same_of_the_same_checkpoint_and_its_files_are_no_pickles(bundle, coder):
    config = Config.read(bundle)
    assert config.codec == fingerprint(coder)
    learnt = copy.deepcopy(coder)
    with torch.no_grad():
        next(learnt.parameters())[0] += 1e-3
    assert fingerprint(learnt) != config.codec, "its codes are those of another"
    assert config.context == 3 + 2 + 1, "a block at 50 frames a second, one at 100, and frames that overlap"
    assert {name for name in config.files if name.endswith((".pt2", ".onnx", ".safetensors"))} == {
        "model.onnx", "decoder.onnx", "model.pt2", "decoder.pt2", "model.safetensors"}
    facts = json.loads((bundle / "parity.json").read_text())
    assert facts["formats"]["onnx"]["difference"] <= OTHER_CODES
    assert facts["decoder"]["from its codes"]["torch"]["difference"] < 1e-3
    assert load_file(bundle / "model.safetensors").keys() == coder.state_dict().keys()


def test_its_readme_runs_where_there_is_onnxruntime_alone(bundle, data, coder, tmp_path):
    [code] = [each for each in re.findall(r"```python\n(.*?)```", (bundle / "README.md").read_text(), re.S)
              if "InferenceSession" in each]
    blocked = "import sys\nsys.modules.update(dict.fromkeys(['torch', 'sbkit', 'speechbrain']))\n"
    home = tmp_path / "b"
    shutil.copytree(bundle, home)
    shutil.copy(data / "test3.wav", home / "clip.wav")
    subprocess.run([sys.executable, "-c", blocked + code], cwd=home, check=True)
    signal = soundfile.read(data / "test3.wav", dtype="float32")[0]
    again, rate = soundfile.read(home / "again.wav", dtype="float32")
    assert rate == 16_000
    np.testing.assert_allclose(again, checkpoints(coder, signal)[1][: len(signal)], atol=2e-3)


def test_a_corpus_becomes_codes_and_sound_again(bundle, tokens, data, coder, tmp_path):
    books = Books((1000, 1000), 50.0, 16_000, Config.read(bundle).codec)
    other = total = 0
    for each in Codes(tokens, books):
        own, _ = checkpoints(coder, soundfile.read(data / f"{each.id}.wav", dtype="float32")[0])
        assert own.shape == each.codes.shape
        other, total = other + (own != each.codes).sum(), total + own.size
    assert total > 12 * 2 * 30 and other <= OTHER_CODES * total
    said = processes.sbkit("resynthesize", bundle, tokens, "--to", tmp_path / "sounds", "--format", "flac")
    assert "12 recordings" in said.stdout
    for i in range(12):
        signal = soundfile.read(data / f"test{i}.wav", dtype="float32")[0]
        sound, rate = soundfile.read(tmp_path / "sounds" / f"test{i}.flac", dtype="float32")
        assert rate == 16_000 and len(sound) == -(-len(signal) // 320) * 320
        np.testing.assert_allclose(sound, checkpoints(coder, signal)[1].clip(-1, 1), atol=2e-3)


def planted(tokens, folder, id):
    """A copy of the codes with an id in it, as another program would have written them."""
    shutil.copytree(tokens, folder)
    path, manifest = folder / "codes-00000.safetensors", folder / "manifest.json"
    codes = load_numpy(path)
    codes["codes"] = codes["codes"].astype(np.int32)
    codes["codes"][5, 1] = id
    save_numpy(codes, path)
    values = json.loads(manifest.read_text())
    values["shards"][0] |= {"bytes": path.stat().st_size, "sha256": disk.sha256(path)}
    manifest.write_text(json.dumps(values))
    return folder


def cut(tokens, folder):
    shutil.copytree(tokens, folder)
    path = folder / "codes-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    return folder


@pytest.mark.parametrize(("spoil", "says"), [
    (functools.partial(planted, id=-1), "test0: frame 5, level 1: id -1 is not in a codebook of 1000 entries"),
    (functools.partial(planted, id=1000), "frame 5, level 1: id 1000 is not in a codebook of 1000 entries"),
    (functools.partial(planted, id=1063), "frame 5, level 1: id 1063 is not in a codebook of 1000 entries"),
    (cut, "codes-00000.safetensors is damaged: it is not the file that manifest.json describes"),
])
def test_codes_that_are_not_right_are_told_by_place_and_no_file_is_written(bundle, tokens, tmp_path, capsys, spoil,
                                                                          says):
    folder = spoil(tokens, tmp_path / "codes")
    assert main(["resynthesize", str(bundle), str(folder), "--to", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err and [each.name for each in tmp_path.iterdir()] == ["codes"]

"""Enhancement from pairs and from clean speech with noise added: trained, scored and heard in its
report, exported, and run on files; and how many decibels it wins after a minute.
"""

import base64
import json
import re

import numpy as np
import processes
import pytest
import soundfile
from trained_runs import here, saved, voice, voices

from sbkit.cli import main

pytestmark = pytest.mark.slow

TINY = ("--channels 16 --hidden 24 --layers 2 --crop_seconds 0.5 --step_seconds 4 --min_steps 0 "
        "--max_batch_seconds 8 --number_of_epochs 2 --num_workers 1 --precision fp32 --noprogressbar --no-check "
        "--ckpt_interval_minutes 0 --ckpt_interval_steps 2").split()

@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return voices(tmp_path_factory.mktemp("data"), noise=0)


def words(out, data, *more, recipe="hparams/enhance.yaml"):
    return "train", recipe, *TINY, "--data_folder", data, "--output_folder", out, *more


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    said = here(*words(out, data))
    assert "48    48" in re.sub(r" +", "    ", said), "no row is left out for want of a text"
    return out


def test_it_is_scored_again_in_the_same_noise(run):
    assert {"brain", "optimizer", "model", "counter", "train_logger"} <= saved(run)
    said = processes.sbkit("evaluate", run, "--device", "cpu", "--workers", "0")
    assert "SI_SNRi" in said.stdout
    facts = json.loads((run / "evaluations" / "test-best" / "result.json").read_text())
    tested = json.loads((run / "test_results.json").read_text())["stats"]
    low, high = facts["SI_SNRi_interval"]
    assert low < facts["SI_SNRi"] < high and facts["SI_SNRi"] == pytest.approx(tested["SI_SNRi"], abs=1e-3)
    assert facts["STOI_of_noisy"] == pytest.approx(tested["STOI_of_noisy"], abs=1e-6)


def test_the_report_lets_one_hear_the_noisy_the_enhanced_and_the_clean(run):
    page = (run / "report.html").read_text()
    assert "Worst recordings" in page and "By the SI-SNR of the noisy recording" in page
    section = page[page.index('id="listen"'):page.index("</section>", page.index('id="listen"'))]
    sounds = [base64.b64decode(each) for each in re.findall(r'src="data:audio/mpeg;base64,([^"]+)"', section)]
    assert len(sounds) == 30 and all(section.count(label) >= 10 for label in ("noisy", "enhanced", "clean"))
    section = page[page.index('id="worst"'):page.index("</section>", page.index('id="worst"'))]
    won = [float(after) - float(before) for before, after in re.findall(r"SI-SNR (-?[\d.]+) to (-?[\d.]+) dB", section)]
    assert len(won) == 10 and won == pytest.approx(sorted(won), abs=0.11), "the least improved first"
    assert all(section.count(f">{label}<") == 10 for label in ("noisy", "enhanced", "clean"))
    embedded = re.findall(r'data-clip="([^"]+)"', page)
    assert len(set(embedded)) == len(embedded) > 30 and set(re.findall(r'data-same="([^"]+)"', page)) < set(embedded)


def test_its_bundle_enhances_files_as_the_checkpoint_does(run, data, tmp_path):
    bundle, formats = tmp_path / "bundle", ("onnx", "torch")
    said = here("export", run, "--to", bundle, "--formats", ",".join(formats), "--clips", 3)
    assert f"use it: sbkit enhance {bundle} FILES" in said
    parity = json.loads((bundle / "parity.json").read_text())
    for compared in (each[name] for each in (parity["formats"], *parity["stream"].values()) for name in formats):
        assert 0 <= compared["difference"] < 1e-4 and compared["batch_difference"] < 1e-4
    assert parity["stream"].keys() == {"0.1 s", "1 s"}
    files = [data / f"test{i}.wav" for i in range(3)]
    for name in formats:
        assert main(["enhance", str(bundle), *map(str, files), "--to", str(tmp_path / name), "--model", name]) == 0
        for file in files:
            assert soundfile.info(tmp_path / name / file.name).frames == soundfile.info(file).frames
    assert "sbkit enhance bundle" in (bundle / "README.md").read_text()


def test_pairs_of_voicebanks_layout_are_learnt_from(tmp_path):
    """The clean one is the target, and no noise is added."""
    folder, out = tmp_path / "vb", tmp_path / "out"
    for number, name in enumerate(("p225_001", "p225_002", "p226_001", "p227_001", "p232_001")):
        where, clean = "testset" if name.startswith("p232") else "trainset_28spk", voice(1.0, number, noise=0)
        noisy = clean + 0.05 * np.random.default_rng(number).standard_normal(len(clean)).astype("f4")
        for kind, sound in (("clean", clean), ("noisy", noisy)):
            (folder / f"{kind}_{where}_wav").mkdir(parents=True, exist_ok=True)
            soundfile.write(folder / f"{kind}_{where}_wav" / f"{name}.wav", sound, 16_000)
    more = ["--number_of_epochs", "1", "--precision", "fp32"]
    processes.sbkit(*words(out, folder, *more, recipe="recipes/Voicebank/enhance/hparams/large.yaml"))
    rows = (out / "manifests" / "train.csv").read_text()
    assert f"{folder}/clean_trainset_28spk_wav/p225_001.wav" in rows
    stats = json.loads((out / "test_results.json").read_text())["stats"]
    noisy, clean = (soundfile.read(folder / f"{kind}_testset_wav" / "p232_001.wav")[0] for kind in ("noisy", "clean"))
    before = stats["SI_SNR"] - stats["SI_SNRi"]
    scale = noisy @ clean / (clean @ clean)
    known = 10 * np.log10(np.sum((scale * clean) ** 2) / np.sum((noisy - scale * clean) ** 2))
    assert before == pytest.approx(known, abs=0.05), "of the pairs as they are on the disk"
    said = processes.sbkit("evaluate", out, "--data_folder", folder, "--split", "dev", "--name", "dev")
    assert "SI_SNRi" in said.stdout, "another corpus has its clean recordings too"


@pytest.mark.long
def test_it_wins_decibels(data, tmp_path):
    """Of a voice that it has never heard, in noises that it has never heard."""
    out = tmp_path / "out"
    processes.sbkit(*words(out, data, "--channels", "48", "--hidden", "96", "--layers", "4", "--min_steps", "200",
                           "--number_of_epochs", "1", "--ckpt_interval_steps", "0"))
    stats = json.loads((out / "test_results.json").read_text())["stats"]
    assert stats["SI_SNRi"] > 6 and stats["STOI"] > stats["STOI_of_noisy"]

"""From a run to its bundle, to labels of recordings that it has never heard, to a run on both."""

import json

import pytest
import soundfile
from processes import sbkit
from trained_runs import ROOT, TONES, tone, tones

from sbkit.data.manifest import Manifest

# Its words are tones, which are silence otherwise.
SMALL = ("--nonspeech null --language und --no-check --noprogressbar --min_steps 250 --step_seconds 4 "
         "--number_of_epochs 1 --d_model 32 --nhead 2 --d_ffn 64 --num_encoder_layers 1 --cnn_channels 4 "
         "--cnn_first_channels 4 --lr 0.01 --num_workers 0 --precision fp32 --spec_augment null "
         "--schedule.max_rise_per_step 0.001 --schedule.max_lr_at_chance 0.01").split()


@pytest.mark.long
def test_a_run_labels_what_the_next_one_learns_from(tmp_path):
    tones(tmp_path / "data", 60, 48, shortest=0.6)
    said = {}
    (tmp_path / "found").mkdir()
    for i in range(30):
        said[str(i)] = TONES[i % 3]
        soundfile.write(tmp_path / "found" / f"{i}.wav", tone(TONES[i % 3], 0.6 + 0.05 * (i % 7), i), 16_000)
    train = ("train", ROOT / "hparams" / "ctc.yaml", *SMALL)
    sbkit(*train, "--data_folder", "data", "--output_folder", "first", cwd=tmp_path)
    sbkit("export", "first", "--to", "first/bundle", "--formats", "torch", "--clips", 4, cwd=tmp_path)
    labelled = sbkit("label", "first/bundle", "found", "--to", "labels", "--calibrate", "data/dev.csv", "--keep", 0.6,
                     "--model", "torch", cwd=tmp_path)
    assert "expected calibration error" in labelled.stdout
    rows = [json.loads(line) for line in (tmp_path / "labels/train.jsonl").read_text().splitlines()]
    right = sum(row["text"] == said[row["id"]] for row in rows)
    assert len(rows) >= 10 and right >= 0.7 * len(rows), "of what is kept most is right"
    source = {"train": ["data/train.csv", "labels/train.jsonl"], "dev": "data/dev.csv", "test": "data/test.csv"}
    sbkit(*train, "--data_folder", json.dumps(source), "--output_folder", "second", "--min_steps", 0, cwd=tmp_path)
    learnt = Manifest.read(tmp_path / "second/manifests/train.csv")
    assert len(learnt) == 60 + len(rows)
    texts = dict(zip(learnt.ids, learnt.texts, strict=True))
    assert {row["id"]: texts[row["id"]] for row in rows} == {row["id"]: row["text"] for row in rows}

"""Keys that nothing reads are told where they resemble one that is read; the list of those is what the code reads."""

from pathlib import Path

import pytest

from sbkit.recipe.reading import read
from sbkit.recipe.source import Findings

SMALL = (Path(__file__).parent / "small.yaml").read_text(encoding="utf-8")


def unread(path: Path) -> dict:
    findings = Findings()
    read(path, {}, findings)
    return {f.key: f.suggestion for f in findings if f.code == "unread-key"}


@pytest.mark.parametrize("key, meant", [
    ("keep_checkpoint", "keep_checkpoints"), ("ckpt_interval", "ckpt_interval_minutes or ckpt_interval_steps"),
    ("Max_grad_norm", "max_grad_norm"), ("label_smoothng", "label_smoothing"),
])
def test_a_misspelt_key_is_told(tmp_path, key, meant):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{SMALL}\n{key}: 5\n")
    assert unread(path) == {key: f"did you mean {meant}?"}


@pytest.mark.parametrize("key", ["colours", "train_log", "sos_index", "wer_file", "layer1"])
def test_a_key_of_ones_own_is_not(tmp_path, key):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{SMALL}\n{key}: 5\n")
    assert unread(path) == {}


def test_a_brain_of_ones_own_may_read_what_it_likes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_reads.py").write_text(
        "from sbkit.tasks.ctc import CTC\n\n\nclass Mine(CTC):\n    def on_fit_start(self):\n"
        "        super().on_fit_start()\n        print(getattr(self.hparams, 'keep_checkpoint', 1))\n")
    path = tmp_path / "recipe.yaml"
    path.write_text(SMALL.replace("sbkit.tasks.ctc.CTC", "mine_reads.Mine") + "\nkeep_checkpoint: 5\nkeep_everi: 5\n")
    assert unread(path) == {"keep_everi": "did you mean keep_every?"}

"""The memory of a captured step is what the card's allocator counts, graphs included."""

import json
from pathlib import Path

import pytest
import torch

from sbkit.rehearsal import fake_gpu, rank, watch
from sbkit.rehearsal.cards import CARDS
from sbkit.rehearsal.report import assemble

CTC = Path(__file__).parents[2] / "hparams" / "ctc.yaml"


@pytest.mark.gpu
def test_the_memory_of_a_step_has_that_of_its_graphs(tmp_path, monkeypatch):
    if not fake_gpu.active():
        pytest.skip("a rehearsal is on a fake GPU")
    torch.zeros(1, device="cuda:0")
    torch.cuda.empty_cache()
    before, seen = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(), []

    def timeline(brain, batch):
        seen.append(before - torch.cuda.mem_get_info()[0])
        return 1 << 20, 1 << 20, {"lines": []}

    monkeypatch.setattr(rank, "memory_timeline", timeline)
    diary = watch.Diary(tmp_path, "measure", 0)
    words = [str(CTC), "--num_encoder_layers=1", "--d_ffn=64", "--graphs=true", "--max_batch_seconds=60",
             "--data_folder=none", "--device=cuda", f"--output_folder={tmp_path / 'run'}"]
    rank.measure({"args": words, "estimate": {}}, diary)
    lines = [{"launch": "measure", "rank": 0, **json.loads(line)} for line in diary.path.read_text().splitlines()]
    report = assemble("recipe.yaml", lines, 1, CARDS["H100"], 0.0)
    figures = report.sections["figures"].values
    assert figures["reserved_bytes"] == pytest.approx(seen[0], rel=0.1) and figures["launches"] <= 7
    assert figures["reserved_bytes"] > figures["graph_bytes"] > 1 << 20
    shown = dict(report.sections["figures"].rows)["peak memory"]
    assert float(shown.partition(" GiB")[0]) == pytest.approx(seen[0] / 2**30, rel=0.1)

"""What stock SpeechBrain trains with in the comparisons."""

import torch

from sbkit.train.muon import Muon
from tools.bench.peers import stock_ctc


def test_stock_has_the_optimizer_of_its_own_recipes_and_a_rate_for_it(tmp_path):
    words = ["--data_folder", str(tmp_path), "--output_folder", str(tmp_path), "--num_encoder_layers", "1"]
    _, hparams = stock_ctc.loaded(words)
    assert hparams["opt_class"].func is Muon, "as the recipe is"
    optimizer = stock_ctc.train.adamw(hparams)(hparams["model"].parameters())
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["lr"] == hparams["schedule"].peak == 0.002
    assert optimizer.defaults["weight_decay"] == hparams["weight_decay"]
    assert hparams["dropout"] == 0.1
    assert hparams["spec_augment"] is None and hparams["intermediate_ctc"] == 0
    assert stock_ctc.loaded([*words, "--lr", "0.004"])[1]["lr"] == 0.004

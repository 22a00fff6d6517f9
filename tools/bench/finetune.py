"""Speed and memory of fine-tuning a pretrained encoder: sbkit and SpeechBrain's wrapper and Brain, alternating.

    python -m tools.bench.finetune [--encoder FOLDER | --tiny] [--rounds 3] [--device cpu] [--data FOLDER]
        [--json FILE] [--key value ...]

Both sides train hparams/finetune.yaml's encoder and head: the same weights (a wav2vec 2.0 of base size, 95 M
parameters, random, unless --encoder names a folder that transformers' save_pretrained wrote), the same batches,
optimizer and frozen convolutional front end, and no masking or dropout. The stock side is SpeechBrain's Brain around
its own ``Wav2Vec2`` with ``freeze_feature_extractor``. Measured are a step on batches in memory, and the peak of memory
of each process. The sides alternate as in train.py; with ratios above 1, sbkit is faster.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tools.bench import train
from tools.bench.harness import ROOT

if TYPE_CHECKING:
    from sbkit.recipe.arguments import CommandLine

RECIPE = ROOT / "hparams" / "finetune.yaml"
BATCHES = 2
#: Keys that switch off what only one side has, and what is random in the encoder.
KEYS = {"head_dropout": 0.0, "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "ckpt_interval_minutes": 0,
        "dropout": 0.0}
#: What ``--tiny`` draws.
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="two narrow layers, to try the program itself")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", help="a corpus (default: the demo corpus)")
    parser.add_argument("--precisions", default="fp32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--recipe", type=Path, default=RECIPE, help=argparse.SUPPRESS)
    parser.add_argument("--pieces", default="step", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.side:
        train.work(args, rest, {"stock": stock, "sbkit": ours}, KEYS)
        return
    with tempfile.TemporaryDirectory() as folder:
        encoder = args.encoder or draw(Path(folder) / "encoder", **(TINY if args.tiny else {}))
        keys = ["--encoder_source", str(encoder), "--max_batch_seconds", "40", "--step_seconds", "40",
                "--freeze", "null", *rest]
        results = train.compare(args, keys, Path(folder), "finetune")
    print(train.show(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def draw(folder: Path, **sizes: Any) -> Path:
    """Write a wav2vec 2.0 of base size, or of other ``sizes``, with random weights in transformers' format."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
                                         feat_proj_dropout=0.0, layerdrop=0.0, **sizes)
    transformers.Wav2Vec2Model(config).save_pretrained(folder)
    extractor: Any = transformers.Wav2Vec2FeatureExtractor
    extractor(do_normalize=True, return_attention_mask=False).save_pretrained(folder)
    return folder


def ours(hparams: dict[str, Any], request: CommandLine) -> SimpleNamespace:
    """Set up sbkit's Brain with the encoder's weights."""
    hparams["encoder"].load()
    return train.ours(hparams, request, BATCHES)


def stock(hparams: dict[str, Any], request: CommandLine) -> SimpleNamespace:
    """Set up SpeechBrain's Brain around its wrapper, as in its Common Voice CTC recipes."""
    import speechbrain as sb
    import torch
    from speechbrain.integrations.huggingface.wav2vec2 import Wav2Vec2

    source = hparams["encoder_source"]
    encoder = Wav2Vec2(source, save_path=source, freeze=False, freeze_feature_extractor=True)
    head = torch.nn.Linear(hparams["encoder"].width, hparams["output_neurons"])
    del hparams["encoder"], hparams["model"], hparams["modules"]  # they would count as its memory

    class Stock(sb.core.Brain):
        def compute_forward(self, batch: Any, stage: Any) -> Any:
            signals, lengths = batch.sig
            return head(encoder(signals, lengths)).log_softmax(-1), lengths

        def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
            log_probs, lengths = predictions
            return sb.nnet.losses.ctc_loss(log_probs.float(), batch.tokens, lengths,
                                           batch.token_lengths / batch.tokens.shape[1], blank_index=0)

        def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
            hparams["schedule"].apply(self.optimizer, self.optimizer_step + 1)

    options = {"device": request.run_opts.device, "precision": request.run_opts.precision}
    brain = Stock({"model": torch.nn.ModuleList([encoder, head])}, hparams["opt_class"], hparams, options)
    brain.on_fit_start()

    @functools.cache
    def kept() -> list[Any]:
        return [batch.to(brain.device) for batch in train.planned(hparams, request.run_opts.device, BATCHES)[1]]

    def step() -> float:
        brain.modules.train()
        for batch in kept():
            brain.step += 1
            print(f"loss {float(brain.fit_batch(batch)):.3f}", file=sys.stderr)
        return train.seconds_of(kept())

    return SimpleNamespace(step=step, brain=brain)


if __name__ == "__main__":
    main()

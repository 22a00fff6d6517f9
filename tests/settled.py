"""The last import of a server that forks tests' processes, each of which is to be as quick as it can.

A run looks for the speed of the CPU by products of matrices, for a third of a second: here by a single one, a sixth of
what a small run takes. A third is what each of them would import, parse and compile again.
"""

import gc
import os
from multiprocessing import forkserver
from pathlib import Path

import sbkit
from sbkit.recipe import files, speed
from sbkit.recipe.source import Findings
from sbkit.rehearsal import nullcard
from sbkit.score.report.templates import TEMPLATES
from sbkit.system import environment

with nullcard.without_driver():
    import speechbrain.lobes.models.transformer.TransformerASR
    import speechbrain.nnet.embedding
    import speechbrain.utils.train_logger  # noqa: F401

    import sbkit.cli
    import sbkit.commands.evaluate
    import sbkit.commands.train
    import sbkit.export.bundle
    import sbkit.nn.initial
    import sbkit.runs.largest_batch
    import sbkit.runs.preparation
    import sbkit.runs.results
    import sbkit.train.muon
    import sbkit.train.train_log  # noqa: F401

for template in TEMPLATES.list_templates(["html"]):
    TEMPLATES.get_template(template)
for recipe in ("ctc.yaml", "codec.yaml"):
    files.chain(Path(__file__).parents[1] / "hparams" / recipe, Findings())
environment.packages()

speed.MEASURE_SECONDS = 0.0
gc.set_threshold(50_000, 20, 50)
gc.freeze()

# What is forked asks this server, too, for what it starts in that way: another would import for seconds.
forkserver.ensure_running.__self__.ensure_running = lambda: None

os.environ["PYTHONPATH"] = os.environ.pop("CALLERS_PYTHONPATH", os.environ.get("PYTHONPATH", ""))

"""Imports, parses and compiles what most runs need, once for all processes that are forked from this one."""

from pathlib import Path

import sbkit
from sbkit.recipe import files
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

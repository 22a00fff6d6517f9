"""Imports, parses and compiles what most runs and exports need, once for all that is forked from this process."""

import contextlib
import functools
import logging
from pathlib import Path

import sbkit
from sbkit.export import graph
from sbkit.recipe import files
from sbkit.recipe.source import Findings
from sbkit.rehearsal import fake_gpu
from sbkit.score.report.templates import TEMPLATES
from sbkit.system import environment

with fake_gpu.without_driver():
    import speechbrain.lobes.models.transformer.TransformerASR
    import speechbrain.nnet.embedding  # noqa: F401

    import sbkit.cli
    import sbkit.commands.evaluate
    import sbkit.commands.train
    import sbkit.export.bundle
    import sbkit.nn.initial
    import sbkit.runs.largest_batch
    import sbkit.runs.preparation
    import sbkit.runs.results
    import sbkit.train.muon  # noqa: F401

for template in TEMPLATES.list_templates(["html"]):
    TEMPLATES.get_template(template)
for recipe in ("ctc.yaml", "codec.yaml"):
    files.chain(Path(__file__).parents[1] / "hparams" / recipe, Findings())
environment.packages()

# Each export reads the sources of hundreds of functions.
with contextlib.suppress(ImportError, AttributeError):  # another torch has them elsewhere
    import torch._dynamo  # noqa: F401 (compilers, and much of what exports)
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
    logging.disable()  # that torchvision isn't installed
    ONNXRegistry.from_torchlib(opset_version=graph.OPSET)
    logging.disable(logging.NOTSET)
